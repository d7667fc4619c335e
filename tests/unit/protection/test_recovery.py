"""What is true of a protection that nobody attends, by what its two agents say."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import Operation
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.protection import agent_client, recovery
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.recovery import is_abandoned, truth
from vmckpt.protection.stop import Known

KNOWN = Known(
    operation=cast("Operation", SimpleNamespace(id="7", guest="web1", guest_uuid="u-1")),
    primary=Host(name="alpha", uri="qemu+tcp://alpha/system"),
    backup=Host(name="beta", uri="qemu+tcp://beta/system"), lease=None, session="5e55",
)  # fmt: skip

NOTHING: Mapping[str, Any] = {}
SILENT = {"error": "alpha: no answer", "unreachable": True}
WORKS = {"role": "primary", "agent": True, "runs": True, "phase": "protecting"}
STARTS = {"role": "primary", "agent": False, "runs": True, "says": "no agent answers"}
ENDED = {"role": "primary", "agent": False, "outcome": "ended", "why": "shut down"}
DIED = {"role": "primary", "agent": False, "outcome": "died", "why": "the guest's QEMU died"}
SWITCHED = {"role": "primary", "agent": False, "outcome": "switched", "why": "it runs on beta"}
STANDS = {"role": "backup", "agent": True, "phase": "waiting"}
BEGINS = {"role": "backup", "agent": False, "says": "no agent answers"}
RUNS = {"role": "backup", "agent": False, "outcome": "failed-over", "why": "silent for 2 s"}
LOST = {"role": "backup", "agent": False, "outcome": "lost", "why": "its QEMU is gone"}
OURS = [NOTHING, SILENT, WORKS, STARTS, ENDED, DIED, SWITCHED]
THEIRS = [NOTHING, SILENT, STANDS, BEGINS, LOST]
ALL = [(ours, theirs) for ours in OURS for theirs in [*THEIRS, RUNS]]


@pytest.mark.parametrize("ours", OURS)
def test_a_guest_that_runs_on_the_backup_does_so_whatever_the_primary_says(
    ours: Mapping[str, Any],
) -> None:
    found = truth(KNOWN, parse_answer(ours), parse_answer(RUNS))

    assert found.outcome is Outcome.COMPLETED
    assert found.did
    second = "; a second copy is running on alpha" if ours in (WORKS, STARTS) else ""
    assert found.truth == f"web1 is running on beta: silent for 2 s{second}"
    assert found.two_copies is bool(second)
    assert ("kill the copy on alpha" in found.did[0]) is bool(second)


@pytest.mark.parametrize("theirs", [SILENT, STANDS, BEGINS])
def test_a_guest_without_an_agent_whose_lease_is_another_s_may_run_twice(
    theirs: Mapping[str, Any],
) -> None:
    found = truth(KNOWN, parse_answer({**STARTS, "lease_holder": "beta"}), parse_answer(theirs))

    assert found.truth == "web1 is running on alpha, and beta holds its lease"
    assert (found.outcome, found.two_copies) == (None, True)
    assert found.did == ()
    ours = truth(KNOWN, parse_answer({**STARTS, "lease_holder": "alpha"}), parse_answer(theirs))
    assert not ours.two_copies


@pytest.mark.parametrize(
    ("ours", "theirs", "who"),
    [
        (SILENT, STANDS, "alpha"), (SILENT, NOTHING, "alpha"), (SILENT, LOST, "alpha"),
        (WORKS, SILENT, "beta"), (NOTHING, SILENT, "beta"), (DIED, SILENT, "beta"),
        (SWITCHED, SILENT, "beta"), (SILENT, SILENT, "alpha and beta"),
    ],
)  # fmt: skip
def test_where_a_host_is_silent_nothing_is_ended(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], who: str
) -> None:
    found = truth(KNOWN, parse_answer(ours), parse_answer(theirs))

    assert (found.outcome, found.did) == (None, ())
    assert f"{who} cannot be queried" in found.truth
    assert f"run vmckpt doctor {who.replace(' and ', ' ')}; if alpha is lost" in found.settle
    assert "vmckpt failover web1" in found.settle


@pytest.mark.parametrize("theirs", [STANDS, BEGINS])
@pytest.mark.parametrize(
    ("ours", "how"), [(WORKS, "protecting"), (STARTS, "vmckpt's agent is restarting")]
)
def test_a_guest_that_runs_and_has_a_standby_is_left_to_its_agents(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], how: str
) -> None:
    """Also while one of them is being started again."""
    found = truth(KNOWN, parse_answer(ours), parse_answer(theirs))

    assert found.truth == f"web1 is protected: {how}"
    assert (found.outcome, found.did, found.goes_on) == (None, (), True)
    assert found.settle == "vmckpt's agents keep running; nothing to do"


@pytest.mark.parametrize("ours", [WORKS, STARTS])
@pytest.mark.parametrize("theirs", [NOTHING, LOST])
def test_without_its_standby_a_protection_has_failed(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    found = truth(KNOWN, parse_answer(ours), parse_answer(theirs))

    assert found.truth == "web1 is running on alpha, and its standby is gone"
    assert found.outcome is Outcome.FAILED


@pytest.mark.parametrize("theirs", [STANDS, BEGINS])
@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (DIED, "QEMU died"),
        (SWITCHED, "it runs on beta"),
        ({"role": "primary", "says": "no agent answers"}, "no agent answers"),
        (NOTHING, "alpha has no record of the protection; alpha may have restarted"),
    ],
)
def test_a_standby_whose_guest_is_gone_is_the_newest_there_is_and_waits_for_a_person(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], why: str
) -> None:
    found = truth(KNOWN, parse_answer(ours), parse_answer(theirs))

    assert (found.outcome, found.did) == (None, ())
    assert "on beta is waiting" in found.truth
    assert why in found.truth
    assert "vmckpt failover web1" in found.settle


@pytest.mark.parametrize("theirs", [NOTHING, STANDS, BEGINS, LOST])
def test_a_guest_that_was_shut_down_needs_no_standby(theirs: Mapping[str, Any]) -> None:
    found = truth(KNOWN, parse_answer(ENDED), parse_answer(theirs))

    assert "shut down, panicked or was stopped on request on alpha" in found.truth
    assert found.outcome is Outcome.COMPLETED
    assert "remove the standby" in found.did


def test_where_neither_host_knows_of_it_it_has_ended() -> None:
    found = truth(KNOWN, parse_answer(NOTHING), parse_answer(NOTHING))

    assert "is no longer protected" in found.truth
    assert found.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(NOTHING, LOST), (DIED, NOTHING), (DIED, LOST), (SWITCHED, NOTHING), (SWITCHED, LOST)],
)
def test_a_guest_that_died_and_has_no_standby_has_failed(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    found = truth(KNOWN, parse_answer(ours), parse_answer(theirs))

    assert found.truth.startswith("web1 no longer has agents or a standby")
    assert found.outcome is Outcome.FAILED


@pytest.mark.parametrize(("ours", "theirs"), ALL)
def test_every_mixture_is_told_in_one_line_and_something_is_done_only_at_an_end(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    found = truth(KNOWN, parse_answer(ours), parse_answer(theirs))

    assert "web1" in found.truth
    assert "\n" not in found.truth + found.settle
    assert bool(found.did) == (found.outcome is not None)


@pytest.mark.parametrize(
    ("told", "abandoned"),
    [
        (NOTHING, False), (SILENT, False), (WORKS, False), (STARTS, True), (ENDED, False),
        (DIED, False), (SWITCHED, False), (STANDS, False), ({**STANDS, "runs": True}, False),
        (BEGINS, False), ({**BEGINS, "runs": True}, True), (RUNS, False), (LOST, False),
    ],
)  # fmt: skip
def test_a_qemu_without_an_agent_is_abandoned(told: Mapping[str, Any], abandoned: bool) -> None:
    assert is_abandoned(parse_answer(told)) is abandoned


def test_a_standby_without_an_agent_is_looked_after_whatever_the_primary_says() -> None:
    left = {**BEGINS, "runs": True}
    for ours in (SILENT, DIED, WORKS):
        found = recovery._with_agents(
            KNOWN,
            truth(KNOWN, parse_answer(ours), parse_answer(left)),
            parse_answer(ours),
            parse_answer(left),
        )
        assert (found.outcome, found.goes_on) == (None, True)
        assert found.settle == "run vmckpt recover to restart its agent on beta"
    ended = truth(KNOWN, parse_answer(ENDED), parse_answer(left))
    assert recovery._with_agents(KNOWN, ended, parse_answer(ENDED), parse_answer(left)) == ended


@pytest.mark.parametrize("dry", [False, True])
async def test_agents_that_are_gone_with_their_guards_are_started_again(
    monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    says = {"alpha": STARTS, "beta": {**BEGINS, "runs": True}}
    orders: list[tuple[str, str, str]] = []

    async def status(host: Host, guest: str) -> ProtectionStatus:
        return parse_answer(dict(says[host.name]))

    async def order(host: Host, guest: str, what: str, *, owner: str) -> dict[str, Any]:
        orders.append((host.name, what, owner))
        return {"did": [f"started the agent on {host.name} again"]}

    monkeypatch.setattr(agent_client, "status", status)
    monkeypatch.setattr(agent_client, "order", order)
    step = SimpleNamespace(intent={"session": "5e55", "lease": True})
    inventory = SimpleNamespace(host=lambda _: KNOWN.backup, lease="postgresql://")
    recorder = SimpleNamespace(entrust=lambda _: None, update=lambda **_: None)
    operation = SimpleNamespace(guest="web1", guest_uuid="u-1", target="beta")
    case = SimpleNamespace(
        step=lambda _: step, inventory=inventory, host=KNOWN.primary, dry=dry,
        recorder=None if dry else recorder, operation=operation,
    )  # fmt: skip
    found = await recovery.settle(cast("OrphanedJob", case), [])

    again = [("beta", "revive", "5e55"), ("alpha", "revive", "5e55")]
    assert orders == ([] if dry else again)
    told = tuple(f"started the agent on {name} again" for name in ("beta", "alpha"))
    assert found.did == (() if dry else told)
    assert (found.outcome, found.goes_on) == (None, True)
    assert found.settle == "run vmckpt recover to restart its agent on alpha and on beta"
