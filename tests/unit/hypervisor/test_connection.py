"""Connections to a host's libvirt: what is refused, what has broken, and what may have happened."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import libvirt
import pytest
import pytest_asyncio

from tests.support import libvirt_host
from vmckpt.errors import HostUnreachable, HypervisorError, LeaseLost, OutcomeUnknown, ReadOnly
from vmckpt.hypervisor import connection
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.host import Host


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("qemu+ssh://root@a/system", "qemu+ssh://root@a/system?no_tty=1"),
        ("qemu+ssh://a/system?keyfile=/k", "qemu+ssh://a/system?keyfile=/k&no_tty=1"),
        ("qemu+ssh://a/system?no_tty=1", "qemu+ssh://a/system?no_tty=1"),
        ("qemu+tls://a/system", "qemu+tls://a/system"),
        ("qemu:///system", "qemu:///system"),
    ],
)
def test_ssh_may_not_ask_questions(uri: str, expected: str) -> None:
    assert connection.without_questions(uri) == expected


@pytest_asyncio.fixture
async def alpha(tmp_path: Path) -> AsyncIterator[Hypervisor]:
    async with Hypervisor(libvirt_host.host(tmp_path)) as found:
        yield found


def runs(connection: libvirt.virConnect) -> bool:
    return bool(connection.lookupByName("web1").isActive())


def destroy(connection: libvirt.virConnect) -> None:
    connection.lookupByName("web1").destroy()


async def test_what_libvirt_refuses_is_told_with_the_host_and_its_code(alpha: Hypervisor) -> None:
    with pytest.raises(HypervisorError, match=r"alpha: looking: .* not found") as caught:
        await alpha.query("looking", lambda it: it.lookupByName("nobody"))
    assert (caught.value.host, caught.value.code) == ("alpha", libvirt.VIR_ERR_NO_DOMAIN)
    assert not isinstance(caught.value, HostUnreachable)


async def test_where_only_looking_is_allowed_nothing_is_changed(tmp_path: Path) -> None:
    async with Hypervisor(libvirt_host.host(tmp_path, read_only=True)) as alpha:
        for call in (alpha.execute, alpha.execute_long):
            with pytest.raises(ReadOnly, match="ending it: refused in read-only mode"):
                await call("ending it", destroy)
        assert await alpha.query("looking", runs)


async def test_the_lease_is_asked_for_right_before_a_change(alpha: Hypervisor) -> None:
    def lost() -> None:
        raise LeaseLost("another controller has it")

    alpha.check_lease = lost
    for call in (alpha.execute, alpha.execute_long):
        with pytest.raises(LeaseLost):
            await call("ending it", destroy)
    assert await alpha.query("looking", runs)
    alpha.check_lease = None
    await alpha.execute("ending it", destroy)
    assert not await alpha.query("looking", runs)


async def test_a_call_that_lasts_keeps_no_other_waiting(alpha: Hypervisor) -> None:
    going, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def migrate(_: libvirt.virConnect) -> str:
        loop.call_soon_threadsafe(going.set)
        return "ended" if gate.wait(10.0) else "was waited for"

    long = asyncio.create_task(alpha.execute_long("migrating", migrate))
    await going.wait()
    assert await alpha.query("looking", runs)
    gate.set()
    assert await long == "ended"


class Breaking:
    """Connections that break at the first calls, as many as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.opened = 0
        monkeypatch.setattr(connection, "start", lambda: None)
        monkeypatch.setattr(libvirt, "open", self._open)

    def _open(self, _: str) -> "Broken":
        self.opened += 1
        return Broken(self)


class Broken:
    def __init__(self, story: Breaking) -> None:
        self._story, self._alive = story, True

    def isAlive(self) -> int:
        return int(self._alive)

    def close(self) -> None: ...

    def setKeepAlive(self, *_: int) -> None: ...

    def lookupByName(self, name: str) -> str:
        if self._story.left:
            self._story.left -= 1
            self._alive = False
            raise libvirt.libvirtError("connection reset")
        return name


HOST = Host(name="alpha", uri="qemu:///system")


@pytest.mark.parametrize(("times", "opened"), [(1, 2), (2, 2)])
async def test_what_changes_nothing_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, times: int, opened: int
) -> None:
    story = Breaking(monkeypatch, times)
    async with Hypervisor(HOST) as alpha:
        if times == 1:
            found: object = await alpha.query("looking", lambda it: it.lookupByName("web1"))
            assert found == "web1"
        else:
            with pytest.raises(HostUnreachable, match="run vmckpt doctor alpha"):
                await alpha.query("looking", lambda it: it.lookupByName("web1"))
    assert story.opened == opened


async def test_what_changes_something_is_never_repeated_and_may_have_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = Breaking(monkeypatch, 1)
    async with Hypervisor(HOST) as alpha:
        for call in (alpha.execute, alpha.execute_long):
            story.left = 1
            with pytest.raises(
                OutcomeUnknown, match="while ending it; the call may have taken effect"
            ):
                await call("ending it", lambda it: it.lookupByName("web1"))
            assert story.left == 0


def test_a_visit_that_cannot_begin_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostUnreachable):
        connection.once("test:///no/such/file", "alpha", "ending it", destroy, changes=True)
    Breaking(monkeypatch, 1)
    with pytest.raises(OutcomeUnknown):
        connection.once(HOST.uri, "alpha", "x", lambda it: it.lookupByName("web1"), changes=True)
    Breaking(monkeypatch, 1)
    with pytest.raises(HostUnreachable):
        connection.once(HOST.uri, "alpha", "x", lambda it: it.lookupByName("web1"), changes=False)
