"""How a protection ends, with agents that a test answers for."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vmckpt.errors import (
    BadInput,
    FencingFailed,
    GuestLocked,
    HypervisorError,
    OutcomeUnknown,
    RemoteError,
    VmckptError,
)
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation
from vmckpt.lease import client
from vmckpt.model.events import Caller
from vmckpt.model.fencing import Fenced, FenceDevice, FenceTopology
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.protection import agent_client, solo_permission, stop
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.stop import Known
from vmckpt.units import Seconds

ALPHA = Host(name="alpha", uri="qemu+tcp://alpha/system")
BETA = Host(name="beta", uri="qemu+tcp://beta/system")
KNOWN = Known(
    operation=cast(
        "Operation", SimpleNamespace(id="7", guest="web1", guest_uuid="u-1", detail={})
    ),
    primary=ALPHA, backup=BETA, lease="postgresql://witness/vmckpt", session="5e55",
)  # fmt: skip
NO_LEASE = replace(KNOWN, lease=None)
FENCED = Fenced(
    host="alpha", agent="fence_fake", level=1, devices=("fence_fake",), at=1.0, took=Seconds(2.0)
)
FAKE = FenceTopology(((FenceDevice(agent="fence_fake", options={}),),))
HAS_FENCE = replace(
    NO_LEASE, primary=replace(ALPHA, fence=FAKE)
)  # fmt: skip
WATCHED = replace(
    HAS_FENCE,
    operation=cast(
        "Operation",
        SimpleNamespace(id="7", guest="web1", guest_uuid="u-1", detail={"judge": "watch"}),
    ),
)  # fmt: skip
RUNS_THERE = {"role": "backup", "outcome": "failed-over", "why": "a person asked"}


class World:
    """What both agents say, and all that was done."""

    def __init__(self) -> None:
        self.says: dict[str, dict[str, Any]] = {
            "alpha": {"role": "primary", "agent": True, "runs": True, "phase": "protecting"},
            "beta": {"role": "backup", "agent": True, "connected": True, "ready": True},
        }
        self.silent: set[str] = set()
        self.after: dict[str, Any] | None = None
        """What the backup says once it has a wish."""
        self.cannot_be_fenced: FencingFailed | None = None
        self.holds = True
        """The journal has answered lately."""
        self.alone = False
        """The journal says that the guest had leave to go on without its standby."""
        self.did: list[str] = []
        self.warned: list[str] = []
        self.finished: list[tuple[Outcome, Mapping[str, Any]]] = []
        self.caller = Caller(
            emit=lambda _: None, warn=self.warned.append, stop=asyncio.Event()
        )  # fmt: skip

    async def order(self, host: Host, guest: str, what: str, **more: Any) -> dict[str, Any]:
        assert guest == "u-1"
        if host.name in self.silent:
            raise RemoteError(f"{host.name}: no answer")
        if wish := more.get("wish"):
            self.did.append(f"{host.name} {wish}")
            if self.after is not None:
                self.says["beta"] = self.after
        elif what != "ask":
            self.did.append(f"{host.name} {what}")
            return {"did": [f"{what}ed"]}
        return self.says[host.name]

    async def ask(self, host: Host, guest: str, **more: Any) -> ProtectionStatus:
        return parse_answer(await self.order(host, guest, "ask", **more))

    async def status(self, host: Host, guest: str) -> ProtectionStatus:
        try:
            return parse_answer(await self.order(host, guest, "ask"))
        except RemoteError as exc:
            return parse_answer({"error": str(exc), "unreachable": True, "silent": True})

    def finish(self, outcome: Outcome, report: Mapping[str, Any]) -> None:
        self.finished.append((outcome, report))

    @contextmanager
    def attended(self, known: Known, caller: Caller) -> Iterator[Recorder]:
        del known, caller
        check = lambda: None  # noqa: E731
        holds = self.holds
        yield cast("Recorder", SimpleNamespace(finish=self.finish, check=check, holds=holds))

    async def fence(self, host: Host, recorder: Recorder, caller: Caller) -> Fenced:
        del recorder, caller
        self.did.append(f"{host.name} fenced")
        if self.cannot_be_fenced is not None:
            raise self.cannot_be_fenced
        self.silent.add(host.name)
        return FENCED

    async def had_leave(self, job: str) -> tuple[int, ...]:
        assert job == "7"
        return (3,) if self.alone else ()

    async def note(self, recorder: Recorder, job: str, why: str) -> None:
        del recorder, job
        self.did.append(f"noted: {why}")

    def revoke(self, *_: object, **__: object) -> None:
        self.did.append("lease given back")


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(agent_client, "order", made.order)
    monkeypatch.setattr(agent_client, "request", made.ask)
    monkeypatch.setattr(agent_client, "status", made.status)
    monkeypatch.setattr(stop, "attended", made.attended)
    monkeypatch.setattr(stop, "fence_host", made.fence)
    monkeypatch.setattr(solo_permission, "alone", made.had_leave)
    monkeypatch.setattr(solo_permission, "note", made.note)
    monkeypatch.setattr(client, "revoke", made.revoke)
    monkeypatch.setattr(stop, "_TURN", 0.001)
    return made


async def test_unprotected_the_guest_runs_on_and_the_standby_goes_first(one: World) -> None:
    done = await stop.unprotect(KNOWN, one.caller)
    assert (done.runs_on, done.why) == ("alpha", "requested")
    assert one.did == ["beta end", "alpha end", "lease given back"]
    assert one.warned == ["beta: ended", "alpha: ended"]
    assert [outcome for outcome, _ in one.finished] == [Outcome.COMPLETED]


async def test_a_guest_that_failed_over_is_unprotected_where_it_runs(one: World) -> None:
    one.says["beta"] = RUNS_THERE
    done = await stop.unprotect(KNOWN, one.caller)
    assert done.runs_on == "beta"
    assert {"alpha end", "beta end", "lease given back"} == set(one.did)


async def test_a_silent_backup_is_left_behind_if_the_lease_keeps_it_from_running(
    one: World,
) -> None:
    one.silent = {"beta"}
    await stop.unprotect(KNOWN, one.caller)
    assert one.did == ["alpha end", "lease given back"]
    assert one.finished == []
    assert "run vmckpt unprotect web1 again once beta is back" in one.warned[-1]


@pytest.mark.parametrize(
    ("known", "silent"), [(NO_LEASE, "beta"), (NO_LEASE, "alpha"), (KNOWN, "alpha")]
)
async def test_where_it_cannot_be_put_back_it_has_not_ended(
    one: World, known: Known, silent: str
) -> None:
    one.silent = {silent}
    with pytest.raises(RemoteError, match=silent):
        await stop.unprotect(known, one.caller)
    assert one.finished == []
    assert "lease given back" not in one.did


async def test_without_a_lease_none_is_given_back(one: World) -> None:
    await stop.unprotect(NO_LEASE, one.caller)
    assert one.did == ["beta end", "alpha end"]


async def test_a_planned_switch_asks_the_primary_and_waits_for_the_backup(one: World) -> None:
    one.after = {**RUNS_THERE, "why": "the primary has handed the guest over"}
    done = await stop.planned(KNOWN, one.caller)
    assert (done.runs_on, done.why) == ("beta", "the primary has handed the guest over")
    assert one.did[0] == "alpha planned"
    assert set(one.did[1:]) == {"alpha end", "beta end", "lease given back"}
    assert one.finished[0][0] is Outcome.COMPLETED
    assert one.finished[0][1]["failed_over"] == "beta"


@pytest.mark.parametrize("phase", ["copying", "alone", "connecting"])
async def test_a_standby_that_is_not_ready_is_not_switched_to(one: World, phase: str) -> None:
    one.says["alpha"]["phase"] = phase
    with pytest.raises(GuestLocked, match="not ready"):
        await stop.planned(KNOWN, one.caller)
    assert one.did == []


async def test_a_switch_that_takes_too_long_has_an_unknown_outcome(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "_SWITCHES", Seconds(0.01))
    one.says["beta"]["says"] = "following the guest"
    with pytest.raises(OutcomeUnknown, match="is not running on beta yet"):
        await stop.planned(KNOWN, one.caller)
    assert one.finished == []
    assert one.warned == ["beta: following the guest"]


async def test_who_gives_up_waiting_is_told_that_it_may_yet_happen(one: World) -> None:
    one.caller.stop.set()
    with pytest.raises(OutcomeUnknown):
        await stop.planned(KNOWN, one.caller)


async def test_a_guest_whose_host_is_well_is_not_failed_over(one: World) -> None:
    with pytest.raises(GuestLocked, match="is running on alpha"):
        await stop.failover(KNOWN, one.caller, dead=True)
    assert one.did == []


async def test_a_dead_host_s_guest_is_failed_over_by_the_lease(one: World) -> None:
    one.silent, one.after = {"alpha"}, RUNS_THERE
    one.says["beta"]["connected"] = False
    done = await stop.failover(KNOWN, one.caller, dead=False)
    assert (done.runs_on, done.why) == ("beta", "a person asked")
    assert one.did == ["beta failover", "beta end", "lease given back"]
    assert one.finished[0][0] is Outcome.COMPLETED


async def test_a_primary_that_says_its_guest_died_gives_it_to_a_ready_standby(one: World) -> None:
    """Also one that died before the lease store called its standby valid."""
    one.says["alpha"] = {"role": "primary", "agent": False, "runs": False, "outcome": "died"}
    one.after = RUNS_THERE
    await stop.failover(KNOWN, one.caller)
    assert one.did[:2] == ["alpha give", "beta failover"]


@pytest.mark.parametrize(
    ("ours", "theirs"), [({"alone": True}, {}), ({}, {"ready": False}), ({"runs": True}, {})]
)
async def test_a_guest_that_is_not_gone_or_has_no_whole_standby_is_given_to_nobody(
    one: World, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    died = {"role": "primary", "agent": False, "runs": False, "outcome": "died"}
    one.says["alpha"] = {**died, **ours}
    one.says["beta"] |= {"connected": False, **theirs}
    one.after = RUNS_THERE
    await stop.failover(KNOWN, one.caller)
    assert "alpha give" not in one.did


async def test_without_a_lease_a_person_must_say_that_the_host_is_off(one: World) -> None:
    one.silent, one.after = {"alpha"}, RUNS_THERE
    one.says["beta"]["connected"] = False
    with pytest.raises(BadInput, match="--host-is-off"):
        await stop.failover(NO_LEASE, one.caller, dead=False)
    assert one.did == []
    assert (await stop.failover(NO_LEASE, one.caller, dead=True)).runs_on == "beta"


async def test_one_that_has_failed_over_by_itself_is_only_tidied(one: World) -> None:
    one.silent = {"alpha"}
    one.says["beta"] = RUNS_THERE
    await stop.failover(KNOWN, one.caller, dead=False)
    assert one.did == ["beta end", "lease given back"]


async def test_a_backup_that_is_silent_too_cannot_be_asked(one: World) -> None:
    one.silent = {"alpha", "beta"}
    with pytest.raises(VmckptError):
        await stop.failover(KNOWN, one.caller, dead=True)
    assert one.finished == []


async def test_the_lease_is_not_given_back_while_the_backup_cannot_be_tidied(one: World) -> None:
    one.silent = {"beta"}
    with pytest.raises(RemoteError):
        await stop.tidy(KNOWN)
    assert one.did == ["alpha end"]


async def test_a_silent_host_is_fenced_before_its_guest_is_asked_for(one: World) -> None:
    one.silent, one.after = {"alpha"}, {**RUNS_THERE, "why": "a person said so; with epoch 7"}
    one.says["beta"]["epoch_age_s"] = 12.0
    done = await stop.failover(HAS_FENCE, one.caller)
    assert one.did == ["alpha fenced", "beta failover", "beta end"]
    assert (done.runs_on, done.fenced) == ("beta", FENCED)
    assert done.why == "fence_fake reports that alpha is off; with epoch 7"
    assert done.as_json()["fenced"]["agent"] == "fence_fake"
    assert one.warned == [
        "web1 will resume from the state it had 12.0 s ago; later changes are lost"
    ]
    assert one.finished[0][1]["fenced"]["host"] == "alpha"


async def test_a_host_that_cannot_be_fenced_keeps_its_guest(one: World) -> None:
    one.silent, one.after = {"alpha"}, RUNS_THERE
    one.cannot_be_fenced = FencingFailed("alpha is not known to be off")
    for fence in (False, True):
        with pytest.raises(FencingFailed):
            await stop.failover(HAS_FENCE, one.caller, fence=fence)
    assert one.did == ["alpha fenced"] * 2
    assert one.finished == []
    # The next try is told so.
    one.cannot_be_fenced = None
    assert (await stop.failover(HAS_FENCE, one.caller)).runs_on == "beta"


async def test_a_controller_that_died_after_the_fencing_is_followed_by_the_next(
    one: World,
) -> None:
    one.silent = {"alpha"}
    one.says["beta"] = {**RUNS_THERE}
    done = await stop.failover(HAS_FENCE, one.caller)
    assert (done.runs_on, done.fenced) == ("beta", None)
    assert "alpha fenced" not in one.did
    assert "beta failover" not in one.did


async def test_a_host_that_answers_is_fenced_only_if_that_is_asked_for(one: World) -> None:
    one.says["alpha"] = {"role": "primary", "agent": False, "runs": True}
    one.after = RUNS_THERE
    with pytest.raises(GuestLocked, match="--fence powers it off first"):
        await stop.failover(HAS_FENCE, one.caller)
    assert one.did == []
    await stop.failover(HAS_FENCE, one.caller, fence=True)
    assert one.did == ["alpha fenced", "beta failover", "beta end"]


async def test_with_a_lease_the_lease_decides_and_nobody_is_fenced_unasked(one: World) -> None:
    one.silent, one.after = {"alpha"}, RUNS_THERE
    known = replace(HAS_FENCE, lease=KNOWN.lease)
    await stop.failover(known, one.caller)
    assert "alpha fenced" not in one.did


async def test_a_person_s_word_is_enough_also_where_there_is_a_fence_agent(one: World) -> None:
    one.silent, one.after = {"alpha"}, RUNS_THERE
    await stop.failover(HAS_FENCE, one.caller, dead=True)
    assert "alpha fenced" not in one.did


async def test_a_guest_that_had_leave_is_not_failed_over_however_silent_its_host(
    one: World,
) -> None:
    one.silent, one.after, one.alone = {"alpha"}, RUNS_THERE, True
    with pytest.raises(GuestLocked, match="had permission to run unprotected there"):
        await stop.failover(WATCHED, one.caller)
    assert one.did == []
    assert (await stop.failover(WATCHED, one.caller, dead=True)).runs_on == "beta"


async def test_leave_that_was_given_since_a_host_was_looked_at_counts(one: World) -> None:
    one.silent, one.after = {"alpha"}, RUNS_THERE
    case = await stop.seen(WATCHED)
    assert not case.alone
    one.alone = True
    with pytest.raises(GuestLocked, match="had permission to run unprotected"):
        await stop.failover(WATCHED, one.caller, case=case)
    assert one.did == []
    one.alone = False
    assert (await stop.failover(WATCHED, one.caller, case=case)).fenced == FENCED


async def test_a_guest_whose_host_says_that_it_is_gone_needs_neither_word_nor_fence(
    one: World,
) -> None:
    one.says["alpha"] = {"role": "primary", "runs": False, "outcome": "died"}
    one.after = {**RUNS_THERE, "why": "a person said so; with epoch 7"}
    done = await stop.failover(NO_LEASE, one.caller)
    assert one.did == ["beta failover", "alpha end", "beta end"]
    assert done.why == "alpha reports the guest as not running; with epoch 7"


async def test_a_watched_guest_is_unprotected_though_its_backup_is_dead(one: World) -> None:
    one.silent = {"beta"}
    await stop.unprotect(WATCHED, one.caller)
    # In this order: a standby that is left there is never failed over to.
    assert one.did == ["noted: the guest is being unprotected", "alpha end"]
    assert one.finished == []
    assert "run vmckpt unprotect web1 again once beta is back" in one.warned[-1]


async def test_a_watched_guest_that_may_run_on_a_silent_backup_is_not_unprotected(
    one: World,
) -> None:
    one.silent = {"beta"}
    one.says["alpha"] = {"role": "primary", "runs": False}
    with pytest.raises(RemoteError, match="beta"):
        await stop.unprotect(WATCHED, one.caller)
    assert one.did == []


async def test_who_lost_the_journal_while_a_host_was_fenced_runs_nothing(one: World) -> None:
    """Another controller may have taken over meanwhile, and given leave."""
    one.silent, one.after, one.holds = {"alpha"}, RUNS_THERE, False
    with pytest.raises(HypervisorError, match="the journal has not answered"):
        await stop.failover(WATCHED, one.caller)
    assert one.did == ["alpha fenced"]


async def test_a_guest_that_waits_for_leave_is_not_switched(one: World) -> None:
    one.says["alpha"]["wants_leave"] = "17"
    with pytest.raises(GuestLocked, match="the standby of web1 is not ready"):
        await stop.planned(WATCHED, one.caller)
    assert one.did == []
