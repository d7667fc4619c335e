"""End a protection on request: unprotect, planned switchover, failover.

Before the guest runs anywhere else, its dead host is powered off, and the journal says so.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import (
    GuestLocked,
    HypervisorError,
    JournalError,
    OutcomeUnknown,
    RemoteError,
    TwoCopies,
    VmckptError,
)
from vmckpt.journal import jobs
from vmckpt.journal import recorder as journal_recorder
from vmckpt.journal.recorder import JournalStepLog, Recorder
from vmckpt.journal.records import Operation, StepState
from vmckpt.lease import client
from vmckpt.model.events import Caller
from vmckpt.model.fencing import Fenced
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.protection import agent_client, host_death, solo_permission
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.host_death import Case, Proof
from vmckpt.protection.request import Judge
from vmckpt.protection.steps import Step
from vmckpt.remote import fence_agent
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds, show_seconds


async def fence_host(host: Host, recorder: Recorder, caller: Caller) -> Fenced:
    """Returns once the host is off for certain; may be repeated. Raises VmckptError: it may be on.

    The options, of which some are secrets, are written down nowhere.
    """
    agents = "" if host.fence is None else host.fence.in_words
    for path in () if host.fence is None else fence_agent.too_open(host.fence):
        caller.warn(f"{path}: others may read the password in it; run chmod 600 {path}")
    intent = {"host": host.name, "agent": agents, "action": "off"}
    step = await asyncio.to_thread(recorder.intend, Step.FENCE, intent)
    caller.warn(f"fencing {host.name}: {agents} powers it off, with all that runs there")
    try:
        done = await fence_agent.power_off(host, caller.stop)
    except VmckptError as exc:
        # It may be off all the same; left open, the step would become a done one at the end.
        told = {"error": exc.message, "at": time.time()}
        with suppress(VmckptError):
            await asyncio.to_thread(recorder.conclude, step, StepState.FAILED, told)
        raise
    with suppress(JournalError):  # the guest must not wait for a full disk here
        await asyncio.to_thread(recorder.conclude, step, StepState.DONE, done.as_json())
    caller.warn(f"{host.name} is off, says {done.agent}")
    return done


_TURN = 0.05
_SWITCHES = Seconds(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """What came of it."""

    guest: str
    runs_on: str
    why: str
    took: Seconds
    fenced: Fenced | None = None
    """The host that was powered off for it; it stays off."""

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "runs_on": self.runs_on, "why": self.why, "took": self.took,
            "fenced": None if self.fenced is None else self.fenced.as_json(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A protection as the journal has it."""

    operation: Operation
    primary: Host
    backup: Host
    lease: str | None
    session: str | None

    @property
    def uuid(self) -> str:
        return self.operation.guest_uuid or ""

    @property
    def watched(self) -> bool:
        """It is failed over by whoever keeps watch: there is no lease store, but leave to."""
        return self.operation.detail.get("judge") == Judge.WATCH


@contextmanager
def attended(known: Known, caller: Caller) -> Iterator[Recorder]:
    """Be its controller, so that nobody else acts on the guest; left to the agents afterwards,
    unless it was written down that it has ended. Raises GuestLocked, JournalError."""
    with (
        jobs.open_journal() as journal,
        journal_recorder.taken_over(
            journal, journal.operation(known.operation.id), caller.warn
        ) as recorder,
    ):
        recorder.entrust(known.primary.name)
        yield recorder


async def unprotect(known: Known, caller: Caller) -> StopResult:
    """End it: the guest runs on where it is, as if it had never been protected.

    Raises VmckptError: not all is put back; may be repeated.
    """
    began = time.monotonic()
    with attended(known, caller) as recorder:
        runs_on = await where(known)
        if runs_on is known.backup:
            await tidy(known)
            done = PutBack((), standby_gone=True)
        else:
            if known.watched:  # a standby that stays behind is nobody's
                await solo_permission.note(recorder, known.operation.id, "it is unprotected")
            done = await put_back(known)
        for line in done.did:
            caller.warn(line)
        took = Seconds(time.monotonic() - began)
        if done.standby_gone:
            recorder.finish(Outcome.COMPLETED, {"unprotected": True, "runs_on": runs_on.name})
        else:
            caller.warn("once that host is back, run vmckpt unprotect again")
    return StopResult(guest=known.operation.guest, runs_on=runs_on.name, why="asked for", took=took)


@dataclass(frozen=True, slots=True)
class PutBack:
    """What was done on both hosts."""

    did: tuple[str, ...]
    standby_gone: bool
    """False: it waits on a host that does not answer, and can never take over."""


async def put_back(known: Known) -> PutBack:
    """End both sides of a protection whose guest runs on the primary.

    The standby goes first: once it is gone nothing can take over. Where its host is silent the
    primary sees to that with the lease store, or whoever keeps watch has seen to it. Raises
    VmckptError.
    """
    did, gone = [], True
    try:
        told = await agent_client.order(
            known.backup, known.uuid, "end", owner=known.session, define=False,
            state=agent_client.kept_in(known.backup, known.uuid),
        )  # fmt: skip
        did += [f"{known.backup.name}: {line}" for line in told["did"]]
    except RemoteError as exc:
        if known.lease is None and not known.watched:
            raise
        gone = False
        did.append(f"{known.backup.name}: its standby is left there: {exc.message}")
    told = await agent_client.order(
        known.primary, known.uuid, "end", standby_gone=gone, owner=known.session,
        state=agent_client.kept_in(known.primary, known.uuid),
    )  # fmt: skip
    did += [f"{known.primary.name}: {line}" for line in told["did"]]
    await give_back(known)
    return PutBack(did=tuple(did), standby_gone=gone)


async def where(known: Known) -> Host:
    """Where the guest is by what both hosts say. With a lease store, or somebody who keeps watch, a
    silent backup has taken nothing from a primary that runs. Raises VmckptError if nobody can
    know."""
    ours = await agent_client.status(known.primary, known.uuid)
    try:
        theirs = await agent_client.request(known.backup, known.uuid)
    except RemoteError:
        if not ours.runs or (known.lease is None and not known.watched):
            raise
        return known.primary
    if is_unclear(ours, theirs):
        raise HypervisorError(
            f"{known.operation.guest} may have taken over on {known.backup.name}, whose libvirt"
            " does not answer",
            host=known.backup.name, hint=f"run vmckpt doctor {known.backup.name}",
        )  # fmt: skip
    return known.backup if is_backups(ours, theirs) else known.primary


def is_backups(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    """Whether the guest is the backup's, by what both hosts say. Pure.

    A host that was started anew has forgotten that it took over; but it knew no such guest before
    that was protected, and a standby does not outlive its host.
    """
    if theirs.outcome == ProtectionOutcome.FAILED_OVER:
        return True
    return _has_forgotten(ours, theirs) and bool(theirs.runs or theirs.known)


def is_unclear(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    """The backup would know whether it is, and its libvirt does not say. Pure."""
    return _has_forgotten(ours, theirs) and theirs.libvirt_silent


def _has_forgotten(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    return theirs.knows_nothing and not ours.runs


async def give_back(known: Known) -> None:
    """End the lease and its login. Raises VmckptError."""
    if known.lease is not None:
        await asyncio.to_thread(
            client.revoke, known.lease, known.uuid, force=True, session=known.session
        )


async def planned(known: Known, caller: Caller) -> StopResult:
    """Let the guest run on the backup, without loss. Raises VmckptError, OutcomeUnknown."""
    began = time.monotonic()
    with attended(known, caller) as recorder:
        told = await agent_client.status(known.primary, known.uuid)
        if told.phase != "protecting" or told.wants_leave:
            raise GuestLocked(
                f"{known.operation.guest}: its standby is not ready: {_said(told)}",
                hint="wait until it is: vmckpt status",
            )
        await agent_client.request(known.primary, known.uuid, wish="planned")
        found = await _until_runs(known, caller)
        return await _failed_over(known, recorder, found, Seconds(time.monotonic() - began))


async def failover(
    known: Known, caller: Caller, *, dead: bool = False, fence: bool = False,
    case: Case | None = None,
) -> StopResult:  # fmt: skip
    """Let the guest run on the backup because the primary is dead.

    `dead`: a person says so. `fence`: it is made so, whatever it answers; without a lease store
    also if it is silent and has a fence agent. With a lease store the lease decides. `case`: how it
    stood a moment ago, by `seen`; whatever it decides is made sure of, or is known to last.

    Raises GuestLocked, BadInput, FencingFailed, LeaseLost, OutcomeUnknown, VmckptError.
    """
    began = time.monotonic()
    with attended(known, caller) as recorder:
        if case is None:
            case = await seen(known, dead=dead, fence=fence)
        elif known.watched:  # only now nobody else gives leave
            case = replace(case, alone=bool(await solo_permission.alone(known.operation.id)))
        why, fenced = host_death.decide(case), None
        age = case.theirs.epoch_age
        if why in (Proof.FENCE, Proof.GONE) and age is not None:
            caller.warn(
                f"{case.guest} will go on from what it was {show_seconds(age)} ago; what it did"
                " since is lost"
            )
        if why is Proof.FENCE:
            fenced = await fence_host(known.primary, recorder, caller)
        if known.watched:  # it took a while; who has taken over may have given leave
            JournalStepLog(recorder).check()
        if why is Proof.LEASE and case.gone and case.theirs.ready:
            with suppress(VmckptError):  # the lease runs out, or says no
                await agent_client.order(known.primary, known.uuid, "give", owner=known.session)
        if why is not Proof.RUNS:
            await agent_client.request(known.backup, known.uuid, wish="failover")
        found = await _until_runs(known, caller)
        took = Seconds(time.monotonic() - began)
        sure = f"{case.primary} says that it does not run there" if why is Proof.GONE else None
        return await _failed_over(known, recorder, found, took, fenced=fenced, sure=sure)


async def seen(known: Known, *, dead: bool = False, fence: bool = False) -> Case:
    """How it stands. Raises JournalError."""
    ours, theirs = await asyncio.gather(
        agent_client.status(known.primary, known.uuid),
        agent_client.status(known.backup, known.uuid),
    )
    if ours.error is not None and theirs.error is None:
        # Meanwhile the backup may have heard of it.
        theirs = await agent_client.status(known.backup, known.uuid)
    alone = await solo_permission.alone(known.operation.id) if known.watched else ()
    return Case(
        guest=known.operation.guest, primary=known.primary.name, backup=known.backup.name,
        ours=ours, theirs=theirs, has_lease=known.lease is not None, watched=known.watched,
        has_fence=known.primary.fence is not None, word=dead, fence=fence, alone=bool(alone),
    )  # fmt: skip


async def _until_runs(known: Known, caller: Caller) -> ProtectionStatus:
    give_up = time.monotonic() + _SWITCHES
    said = ""
    while True:
        told = await agent_client.status(known.backup, known.uuid)
        if told.outcome == ProtectionOutcome.FAILED_OVER:
            return told
        if (says := _said(told)) != said:
            said = says
            caller.warn(f"{known.backup.name}: {says}")
        if time.monotonic() > give_up or caller.stop.is_set():
            raise OutcomeUnknown(
                f"{known.operation.guest} does not run on {known.backup.name} yet: {says}",
                host=known.backup.name,
                hint="see vmckpt status",
            )
        await asyncio.sleep(_TURN)


async def _failed_over(
    known: Known, recorder: Recorder, told: ProtectionStatus, took: Seconds, *,
    fenced: Fenced | None = None, sure: str | None = None,
) -> StopResult:  # fmt: skip
    """The guest runs on the backup: what is left of the protection goes. `sure`: what made sure
    that it runs nowhere else, if that was not what the backup says."""
    guest, why = known.operation.guest, str(told.why)
    await tidy(known, off=fenced is not None)
    report: dict[str, Any] = {"failed_over": known.backup.name, "why": why}
    if fenced is not None:
        sure = f"{fenced.host} is off, says {fenced.agent}"
        report["fenced"] = fenced.as_json()
    if sure is not None:
        # The backup takes whoever asks for a person who knows.
        report["why"] = why = sure + "".join(why.partition(";")[1:])
    recorder.finish(Outcome.COMPLETED, report)
    return StopResult(guest=guest, runs_on=known.backup.name, why=why, took=took, fenced=fenced)


async def tidy(known: Known, *, off: bool = False) -> None:
    """After a failover: the agents' files go, where hosts answer; and the lease. `off`: the primary
    need not be asked. Raises TwoCopies, VmckptError."""
    if not off:
        try:
            await agent_client.order(
                known.primary, known.uuid, "end", owner=known.session, define=False,
                standby_gone=True, state=agent_client.kept_in(known.primary, known.uuid),
            )  # fmt: skip
        except TwoCopies:
            raise
        except VmckptError:
            pass  # its files stay until that host is started anew
    await agent_client.order(known.backup, known.uuid, "end", owner=known.session)
    await give_back(known)


def _said(told: ProtectionStatus) -> str:
    return str(told.says or told.error or told.phase or "it says nothing")
