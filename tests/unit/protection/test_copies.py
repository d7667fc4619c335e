"""A guest that has two copies is never passed over in silence: what decides, and who shows it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.replicas import LEASE, session
from tests.support.twice import TWICE, WEB
from tests.tui.still import FLEET, NOW, PROTECT, entry, guest
from tests.unit.monitor.test_health import key, scraped
from vmckpt import recovery as recovering
from vmckpt.agent.replication import orders, teardown
from vmckpt.app import fleet, migration, policies, protection
from vmckpt.cli import app
from vmckpt.cli import hosts as hosts_command
from vmckpt.cli import jobs as jobs_command
from vmckpt.errors import TwoCopies
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.model.guest import MEND, Guest, merged, two_copies
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.monitor import alerts
from vmckpt.monitor.alerts import State
from vmckpt.monitor.health import Standing, troubles
from vmckpt.monitor.prometheus import Exporter
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.copies import of_protections, second_copy
from vmckpt.recovery import Recovered
from vmckpt.units import Seconds

HOSTS = {name: Host(name=name, uri=f"qemu+tcp://{name}/system") for name in ("alpha", "beta")}
INVENTORY = Inventory(path=Path("hosts.yaml"), hosts=HOSTS, observer=None)
OVER = {"role": "backup", "outcome": "failed-over", "why": "silent for 2 s", "runs": True}
BOTH = entry()
BOTH["says"]["alpha"]["runs"] = True
BOTH["says"]["beta"] = OVER


# What decides


WORKS = {"role": "primary", "runs": True}


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ({}, {}, None),
        (WORKS, {"role": "backup", "runs": True}, None),
        (WORKS, {"error": "silent"}, None),
        (WORKS, OVER, "its standby has taken over, and its QEMU on the primary was not ended"),
        (WORKS, {**OVER, "runs": False}, None),
        ({**WORKS, "runs": False}, OVER, None),
        ({"role": "backup", "runs": True}, OVER, None),
        ({**WORKS, "lease_holder": "beta"}, {"error": "silent"}, "beta holds its lease"),
        ({**WORKS, "lease_holder": "alpha"}, {"error": "silent"}, None),
        ({**WORKS, "lease_holder": "beta", "runs": False}, {"error": "silent"}, None),
    ],
)  # fmt: skip
def test_what_agents_say_counts_as_well(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], why: str | None
) -> None:
    assert second_copy(parse_answer(ours), parse_answer(theirs), "alpha") == why


def test_a_guest_that_both_libvirt_and_agents_show_is_one() -> None:
    told = of_protections([BOTH])
    seen = two_copies([("gamma", guest(6, "safe", "gamma")), ("alpha", guest(6, "safe", "alpha"))])
    (one,) = merged(seen, told)
    assert (one.guest, one.hosts) == ("safe", ("gamma", "alpha", "beta"))
    assert one.text.startswith("safe runs on gamma and alpha and beta: its standby has taken over")
    assert of_protections([entry()]) == ()


# Where it comes from


Found = list[tuple[Host, Guest]]


def asked(monkeypatch: pytest.MonkeyPatch, *looks: Found) -> list[Seconds | None]:
    """The hosts answer like that, one look after the other; the limits of the looks."""
    limits: list[Seconds | None] = []
    answers = iter(looks)

    async def guests(_: object, within: Seconds | None = None) -> object:
        limits.append(within)
        return next(answers), {}

    monkeypatch.setattr(fleet, "guests", guests)
    monkeypatch.setattr("vmckpt.app.controller.load_inventory", lambda _: INVENTORY)
    return limits


ONE: Found = [(HOSTS["beta"], WEB)]
TWO: Found = [(host, WEB) for host in HOSTS.values()]


async def test_hosts_are_asked_again_before_a_guest_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = asked(monkeypatch, TWO, TWO, TWO, ONE, ONE)
    assert await fleet.copies(INVENTORY, within=Seconds(3.0)) == (TWICE,)
    assert limits == [3.0, 3.0]
    assert await fleet.copies(INVENTORY) == ()  # it had moved
    assert await fleet.copies(INVENTORY) == ()
    assert len(limits) == 5


async def test_a_primary_is_asked_after_a_backup_that_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its guest ended before the standby took over, and after it had answered."""
    rounds: list[list[str]] = []

    async def both(hosts: Mapping[str, Host], *_: object) -> dict[str, ProtectionStatus]:
        rounds.append(list(hosts))
        ours = {**WORKS, "runs": len(rounds) == 1}
        return {name: parse_answer(ours if name == "alpha" else OVER) for name in hosts}

    monkeypatch.setattr(agent_client, "both", both)
    told = await protection.job_status(INVENTORY, PROTECT.operation)
    assert rounds == [["alpha", "beta"], ["alpha"]]
    assert of_protections([told]) == ()


@pytest.mark.parametrize(
    ("holder", "expected"),
    [("beta", {"lease_holder": "beta", "runs": True}), ("alpha", {}), (None, {}), ("silent", {})],
)
def test_a_guest_without_an_agent_says_who_holds_its_lease(
    monkeypatch: pytest.MonkeyPatch, holder: str | None, expected: dict[str, Any]
) -> None:
    @contextmanager
    def lease(_: object) -> Iterator[Any]:
        def look() -> Any:
            if holder == "silent":
                raise LeaseUnreachable("the lease store is silent")
            return SimpleNamespace(holder=holder)

        yield SimpleNamespace(look=look)

    monkeypatch.setattr(teardown, "lease", lease)
    monkeypatch.setattr(identity, "runs", lambda _: True)
    assert orders._another_holds(session(lease=LEASE)) == expected
    assert orders._another_holds(session(lease=LEASE, role="backup")) == {}
    assert orders._another_holds(session()) == {}


# Who shows it


@pytest.mark.parametrize("json", [False, True])
def test_the_list_of_guests_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    asked(monkeypatch, TWO, TWO)
    with pytest.raises(TwoCopies, match=r"web1 runs on alpha and beta; run vmckpt recover"):
        hosts_command.guests(json=json)
    assert "web1" in capsys.readouterr().out


@pytest.mark.parametrize("json", [False, True])
def test_the_list_of_jobs_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    monkeypatch.setattr(jobs, "open_journal", _nothing)
    monkeypatch.setattr(jobs, "jobs", lambda *_, **__: [PROTECT])
    monkeypatch.setattr(jobs_command, "protections", lambda *_: {"p-9abc": BOTH})
    args = ["jobs", "--json"] if json else ["jobs"]
    assert app.run(args) == 27
    told = capsys.readouterr()
    assert "safe runs on alpha and beta: its standby has taken over" in told.err
    assert ('"two_copies"' if json else "two copies") in told.out
    monkeypatch.setattr(jobs_command, "protections", lambda *_: {"p-9abc": entry()})
    assert app.run(args) == 0
    assert "copies" not in capsys.readouterr().out


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def recovered(settled: Settled) -> Recovered:
    return Recovered(operation=PROTECT.operation, settled=settled)


REFUSED = Settled(truth="safe runs on two hosts", outcome=None, settle="end one", two_copies=True)


@pytest.mark.parametrize(
    ("found", "looks", "code", "words"),
    [
        ([], [ONE], 0, "nothing to recover"),
        ([], [TWO, TWO], 27, "web1 runs on alpha and beta"),
        ([recovered(REFUSED)], [ONE], 27, "safe runs on two hosts"),
        ([recovered(replace(REFUSED, outcome=Outcome.COMPLETED))], [ONE], 0, ""),
        ([recovered(replace(REFUSED, two_copies=False))], [ONE], 13, "p-9abc: not settled"),
    ],
)
def test_recovery_looks_for_it_and_ends_with_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    found: list[Recovered], looks: list[Found], code: int, words: str,
) -> None:  # fmt: skip
    asked(monkeypatch, *looks)

    async def recover(*_: object, **__: object) -> list[Recovered]:
        return found

    monkeypatch.setattr(migration, "recover", recover)
    monkeypatch.setattr(policies, "survey_policies", lambda *_: SimpleNamespace(policies=()))
    assert app.run(["recover"]) == code
    assert words in capsys.readouterr().err


def test_what_recovery_was_refused_for_two_copies_stays_known_as_that() -> None:
    told = recovering._unsettled(TwoCopies("web1 runs on both", hint="choose"))
    assert (told.two_copies, told.outcome, told.settle) == (True, None, "choose")
    assert told.as_json()["two_copies"] is True


SEEN = replace(FLEET, copies=(TWICE,))


@pytest.mark.parametrize(
    ("standing", "guest_name"),
    [
        (Standing(fleet=SEEN), "web1"),
        (Standing(protections={"p-9abc": BOTH}), "safe"),
    ],
)
def test_prometheus_and_the_operator_are_told(standing: Standing, guest_name: str) -> None:
    exporter = Exporter()
    exporter.now = standing
    told = {one: value for one, value in scraped(exporter).items() if one[0].endswith("copies")}
    (one,) = told
    labels = dict(one[1])
    assert (one[0], labels["guest"], labels["hosts"]) == (
        "vmckpt_guest_copies", guest_name, "alpha beta",
    )  # fmt: skip
    assert told == {key("guest_copies", **labels): 2}
    (name, trouble), *_ = [
        (name, one) for name, one in troubles(standing).items() if name.startswith("copies")
    ]
    assert trouble.text.startswith(f"two copies: {guest_name} runs on alpha and beta")
    assert (trouble.hint, trouble.guest, trouble.host) == (MEND, guest_name, "alpha")

    known, pages = alerts.watch({}, {name: trouble}, Seconds(0.0), NOW)
    assert pages == []
    known, pages = alerts.watch(known, {name: trouble}, Seconds(31.0), NOW)
    assert [(page.state, page.as_json()["guest"]) for page in pages] == [(State.FIRING, guest_name)]
    _, pages = alerts.watch(known, {}, Seconds(60.0), NOW)
    assert [page.state for page in pages] == [State.RESOLVED]


def test_where_each_guest_runs_once_nobody_is_told() -> None:
    exporter = Exporter()
    exporter.now = standing = Standing(fleet=FLEET, protections={"p-9abc": entry()})
    assert [one for one in scraped(exporter) if one[0].endswith("guest_copies")] == []
    assert [name for name in troubles(standing) if name.startswith("copies")] == []
