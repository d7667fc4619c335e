"""A libvirt that answers nonsense, or never."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import libvirt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.guest_xml import MANY_DEVICES, stats
from vmckpt.errors import BadInput, HostUnreachable, HypervisorError, OutcomeUnknown, VmckptError
from vmckpt.hypervisor import connection, domain_xml, domains, host_facts, storage
from vmckpt.hypervisor.connection import NONSENSE, ConnectionThread, Hypervisor
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.model.host import Host
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import slowness

HOST = Host(name="alpha", uri="qemu:///system")
ODD: list[Any] = [None, -1, 2**64, 10**30, "x", "", 1.5, [], {}, (), b"x", True, object(), [None]]
LAUGHS = (
    "<!DOCTYPE d [<!ENTITY a 'ha'>"
    + "".join(f"<!ENTITY {chr(98 + i)} '{f'&{chr(97 + i)};' * 10}'>" for i in range(12))
    + "]><domain><name>&m;</name></domain>"
)


class Fake:
    """libvirt's objects: whatever is called gives what was set, or does it."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer = self.answers.get(name, 1)
        return answer if callable(answer) else lambda *_args, **_more: answer


def domain(**changes: Any) -> Fake:
    whole = {
        "XMLDesc": MANY_DEVICES, "state": [1, 1], "snapshotNum": 0, "jobStats": stats(),
        "name": "web1", "UUIDString": "u", "autostart": 0,
    }  # fmt: skip
    return Fake(**(whole | changes))


def host(**changes: Any) -> Fake:
    whole = {
        "listAllDomains": [domain()], "lookupByName": domain(), "lookupByUUIDString": domain(),
        "getCapabilities": "<capabilities/>", "getHostname": "a", "getInfo": ["x", 1, 8],
        "getMemoryStats": {"total": 100, "free": 50}, "getLibVersion": 9000000,
        "getVersion": 7002022, "listAllNetworks": [],
    }  # fmt: skip
    return Fake(**(whole | changes))


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """What libvirt.open gives from now on."""
    monkeypatch.setattr(connection, "start", lambda: None)

    def use(answer: Any) -> None:
        opened = answer if callable(answer) and not isinstance(answer, Fake) else None
        monkeypatch.setattr(libvirt, "open", opened or (lambda _uri: answer))

    return use


@pytest.fixture
async def hypervisor() -> AsyncIterator[Hypervisor]:
    async with Hypervisor(HOST) as one:
        yield one


async def one_line(call: Awaitable[object]) -> str:
    """The error of a call; what it gives if there is none."""
    try:
        return str(await call)
    except VmckptError as exc:
        told = str(exc)
    assert "alpha" in told
    assert len(told) < 600
    assert "\n" not in told
    return told


Connect = Callable[[Any], None]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
async def test_nonsense_is_one_line_that_names_the_host(
    odd: Any, connect: Connect, hypervisor: Hypervisor
) -> None:
    for what in ("XMLDesc", "state", "snapshotNum", "jobStats", "name", "UUIDString"):
        connect(host(listAllDomains=[domain(**{what: odd})], lookupByName=domain(**{what: odd})))
        hypervisor._short._connection = None
        await one_line(domains.all_guests(hypervisor))
        await one_line(domains.find_guest(hypervisor, "web1"))
        await one_line(host_facts.host_facts(hypervisor))
        assert (await domains.presence(hypervisor, "web1")).state in (
            *domain_xml.STATES.values(),
            None,
        )


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
async def test_a_host_that_makes_no_sense_is_one_line(
    odd: Any, connect: Connect, hypervisor: Hypervisor
) -> None:
    for what in ("listAllDomains", "getCapabilities", "getHostname", "getInfo", "getMemoryStats",
                 "getLibVersion", "getVersion", "listAllNetworks"):  # fmt: skip
        connect(host(**{what: odd}))
        hypervisor._short._connection = None
        await one_line(host_facts.host_facts(hypervisor))
        await one_line(domains.all_guests(hypervisor))


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
async def test_a_migration_is_sampled_or_the_error_is_one_line(
    odd: Any, connect: Connect, hypervisor: Hypervisor
) -> None:
    for answer in (odd, *({**stats(), key: odd} for key in stats())):
        connect(host(lookupByUUIDString=domain(jobStats=answer)))
        hypervisor._short._connection = None
        mover = LibvirtMigrationDriver(hypervisor, hypervisor, "u")
        await one_line(mover.sample())
        await one_line(mover.totals())


async def test_a_change_with_a_senseless_answer_may_have_happened(
    connect: Connect, hypervisor: Hypervisor
) -> None:
    def change(_connection: Any) -> None:
        raise KeyError("x")

    connect(host())
    with pytest.raises(
        OutcomeUnknown, match="invalid answer: KeyError: 'x'; the call may have taken"
    ):
        await hypervisor.execute("a change", change)
    with pytest.raises(HypervisorError, match="a question: invalid answer: KeyError") as caught:
        await hypervisor.query("a question", change)
    assert not isinstance(caught.value, OutcomeUnknown)


@pytest.fixture
def silence() -> Iterator[Callable[..., Any]]:
    """A call that never comes back, as long as the test lasts."""
    ended = threading.Event()
    yield lambda *_args: ended.wait(30)
    ended.set()


@pytest.mark.parametrize("way", ["query", "execute", "execute_long"])
async def test_a_libvirt_that_never_answers_a_connection_is_given_up(
    way: str, silence: Callable[..., Any], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OPEN_LIMIT", Seconds(0.2))
    connect(silence)
    hypervisor = Hypervisor(HOST)
    began = time.monotonic()

    with pytest.raises(
        HostUnreachable, match=r"alpha: libvirt connection: no answer within 0\.2 s"
    ):
        await getattr(hypervisor, way)("a call", lambda _connection: None)
    assert time.monotonic() - began < 2 * slowness()


async def test_a_call_that_never_comes_back_is_given_up(
    silence: Callable[..., Any], connect: Connect
) -> None:
    connect(host(listAllDomains=silence))
    hypervisor, limit = Hypervisor(HOST), Seconds(0.2)

    with pytest.raises(HostUnreachable, match=r"no answer within 0\.2 s"):
        await hypervisor.query("listing", lambda one: one.listAllDomains(), limit=limit)
    with pytest.raises(OutcomeUnknown, match="may have taken effect"):
        await hypervisor.execute("changing", lambda one: one.listAllDomains(), limit=limit)


async def test_whoever_waits_hears_of_every_end() -> None:
    lane = ConnectionThread("x")

    with pytest.raises(ValueError, match="an expected item is missing"):
        async with asyncio.timeout(2):
            await lane.run(lambda: next(iter([])))
    lane.close()


@pytest.mark.parametrize(
    "xml",
    [
        LAUGHS, '<!DOCTYPE d SYSTEM "file:///etc/passwd"><domain/>',
        '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]><domain><name>&x;</name></domain>',
        "<domain>" * 100_000, "<domain>" + "<a>" * 300 + "</a>" * 300 + "</domain>",
        "<domain>" + "x" * (5 << 20) + "</domain>", "<html/>", "", "<", "\x00",
        "<domain/><domain/>",
        "<domain>&x;</domain>", "<domain><vcpu>-1</vcpu></domain>", "<domain><vcpu/></domain>",
        "<domain><memory>" + "9" * 5000 + "</memory></domain>",
        "<domain><memory unit='GiB'>9999999999999999999</memory></domain>",
        "<domain><memory>1.5</memory></domain>", "\udcff<domain/>",
    ],
    ids=range(18),
)  # fmt: skip
def test_hostile_xml_is_refused_at_once(xml: str) -> None:
    began = time.process_time()
    with pytest.raises(NONSENSE):
        domain_xml.guest(xml, state=1, persistent=True, autostart=True, snapshots=0, job=None)
    assert time.process_time() - began < 1


def test_hostile_xml_of_hosts_and_drives_is_refused_too() -> None:
    for read in (domain_xml.machines, domain_xml.host_uuid, storage.read_drives):
        with pytest.raises(NONSENSE):
            read(LAUGHS)


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from([*stats(), "disk_bps", "auto_converge_throttle", "time_elapsed"]),
        st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.booleans(),
    )
)
def test_a_sample_makes_sense_or_is_none(changes: dict[str, Any]) -> None:
    try:
        seen = domain_xml.job_sample(
            {**stats(), **changes}, at=Seconds(0.0), paused=False, post_copy=False
        )
    except ValueError:
        return
    numbers = (
        seen.remaining, seen.total, seen.transferred, seen.bandwidth, seen.iteration,
        seen.dirty_rate or 0, seen.throttle,
    )  # fmt: skip
    assert all(type(one) is int and 0 <= one < 1 << 63 for one in numbers)
    assert seen.expected_downtime is None or 0 < seen.expected_downtime < 1e16


@pytest.mark.parametrize("name", ["\x00", "a\x1bb", "\ud800", "\ufffe"])
async def test_libvirt_is_not_asked_for_names_that_no_guest_has(
    name: str, connect: Connect, hypervisor: Hypervisor
) -> None:
    def look(_name: str) -> None:
        raise AssertionError("it was asked")

    connect(host(lookupByName=look, lookupByUUIDString=look))

    assert await domains.find_guest(hypervisor, name) is None


@pytest.mark.parametrize("value", ["\x00", "\x1b", "\udcff", "\uffff"])
def test_a_label_that_no_definition_holds_is_refused(value: str) -> None:
    with pytest.raises(BadInput, match="a label must not contain control characters"):
        domain_xml.labels_xml({"a": value})


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
def test_labels_come_back_as_they_were_or_are_refused(labels: dict[str, str]) -> None:
    try:
        text = domain_xml.labels_xml(labels)
    except BadInput:
        return
    whole = text.replace("<labels", f"<labels xmlns='{domain_xml.LABELS}'", 1)
    found = domain_xml.guest(
        f"<domain><metadata>{whole}</metadata></domain>",
        state=1, persistent=True, autostart=True, snapshots=0, job=None,
    )  # fmt: skip
    assert dict(found.labels) == labels


@pytest.mark.parametrize("state", [0, 6, 99], ids=["no state", "crashed", "unknown"])
async def test_a_guest_with_a_process_is_never_called_off(
    state: int, connect: Connect, hypervisor: Hypervisor
) -> None:
    for active in (True, False):
        one = domain(state=[state, 1], isActive=active)
        connect(host(lookupByUUIDString=one, lookupByName=one))
        hypervisor._short._connection = None
        found = (await domains.presence(hypervisor, "web1")).state
        assert (found is not None and found.is_active) == active
