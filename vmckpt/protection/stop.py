"""End a protection on request: unprotect, planned switchover, failover.

If a failover powers the guest's host off, it does so before the guest is started on the backup, and
the journal records this.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from shlex import quote
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
    """Power a host off. Returns once the host is confirmed to be off; may be repeated.

    The options of the fence agent are not recorded, as they may contain secrets. After VmckptError,
    the host may still be on.
    """
    agents = "" if host.fence is None else host.fence.in_words
    for path in () if host.fence is None else fence_agent.too_open(host.fence):
        where = quote(str(path))
        caller.warn(f"{path}: other users can read the password in it; run chmod 600 {where}")
    intent = {"host": host.name, "agent": agents, "action": "off"}
    step = await asyncio.to_thread(recorder.intend, Step.FENCE, intent)
    caller.warn(f"fencing {host.name}: powering it and all its guests off with {agents}")
    try:
        done = await fence_agent.power_off(host, caller.stop)
    except VmckptError as exc:
        # The host may be off nevertheless. A step left open would be closed as done at the end.
        told = {"error": exc.message, "at": time.time()}
        with suppress(VmckptError):
            await asyncio.to_thread(recorder.conclude, step, StepState.FAILED, told)
        raise
    with suppress(JournalError):  # a full disk here must not stop the failover
        await asyncio.to_thread(recorder.conclude, step, StepState.DONE, done.as_json())
    caller.warn(f"{done.agent} reports that {host.name} is off")
    return done


_TURN = 0.05
_SWITCHES = Seconds(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """The host on which a guest is running after the end of its protection, and why."""

    guest: str
    runs_on: str
    why: str
    took: Seconds
    fenced: Fenced | None = None
    """The host that was powered off, which stays off; None if no host was powered off."""

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "runs_on": self.runs_on, "why": self.why, "took": self.took,
            "fenced": None if self.fenced is None else self.fenced.as_json(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A protection as the journal records it."""

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
        """Whether `vmckpt run` fails the guest over automatically, without a lease store."""
        return self.operation.detail.get("judge") == Judge.WATCH


@contextmanager
def attended(known: Known, caller: Caller) -> Iterator[Recorder]:
    """Become the controller of a protection, so that no other controller acts on the guest.

    Afterwards the protection is delegated to the agents again, unless its end was recorded. Raises
    GuestLocked, JournalError, LeaseLost.
    """
    with (
        jobs.open_journal() as journal,
        journal_recorder.taken_over(
            journal, journal.operation(known.operation.id), caller.warn
        ) as recorder,
    ):
        recorder.entrust(known.primary.name)
        yield recorder


async def unprotect(known: Known, caller: Caller) -> StopResult:
    """End a protection. The guest keeps running where it is, as if it had never been protected.

    After VmckptError, parts of the protection may be left; may be repeated. Raises GuestLocked if
    another process controls the protection, JournalError, LeaseLost, TwoCopies, VmckptError.
    """
    began = time.monotonic()
    with attended(known, caller) as recorder:
        runs_on = await where(known)
        if runs_on is known.backup:
            await tidy(known)
            done = PutBack((), standby_gone=True)
        else:
            if known.watched:  # `vmckpt run` must not start a standby that is left
                await solo_permission.note(
                    recorder, known.operation.id, "the guest is being unprotected"
                )
            done = await put_back(known)
        for line in done.did:
            caller.warn(line)
        took = Seconds(time.monotonic() - began)
        if done.standby_gone:
            recorder.finish(Outcome.COMPLETED, {"unprotected": True, "runs_on": runs_on.name})
        else:
            caller.warn(
                f"run vmckpt unprotect {known.operation.guest} again once {known.backup.name} is"
                " back"
            )
    return StopResult(guest=known.operation.guest, runs_on=runs_on.name, why="requested", took=took)


@dataclass(frozen=True, slots=True)
class PutBack:
    """What was done on both hosts."""

    did: tuple[str, ...]
    standby_gone: bool
    """Whether the standby was removed; if not, the backup is unreachable, but cannot take over."""


async def put_back(known: Known) -> PutBack:
    """End both sides of a protection whose guest is running on the primary.

    The standby is removed first; after that, no host can take over. If the backup is unreachable,
    the primary invalidates the standby in the lease store, or the journal has a permission to run
    unprotected. Raises VmckptError.
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
        did.append(f"{known.backup.name}: the standby may not have been removed: {exc.message}")
    told = await agent_client.order(
        known.primary, known.uuid, "end", standby_gone=gone, owner=known.session,
        state=agent_client.kept_in(known.primary, known.uuid),
    )  # fmt: skip
    did += [f"{known.primary.name}: {line}" for line in told["did"]]
    await give_back(known)
    return PutBack(did=tuple(did), standby_gone=gone)


async def where(known: Known) -> Host:
    """Return the backup if the guest has failed over, otherwise the primary, from both answers.

    With a lease store or `vmckpt run`, a silent backup has not taken over from a running primary.
    Raises VmckptError if the host cannot be determined.
    """
    ours = await agent_client.status(known.primary, known.uuid)
    try:
        theirs = await agent_client.request(known.backup, known.uuid)
    except RemoteError:
        if not ours.runs or (known.lease is None and not known.watched):
            raise
        return known.primary
    if is_unclear(ours, theirs):
        raise HypervisorError(
            f"{known.operation.guest} may have failed over to {known.backup.name}, whose libvirt"
            " does not answer",
            host=known.backup.name, hint=f"run vmckpt doctor {known.backup.name}",
        )  # fmt: skip
    return known.backup if is_backups(ours, theirs) else known.primary


def is_backups(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    """Return whether the guest has failed over to the backup, according to both answers. Pure.

    A backup that has restarted has forgotten that it took over. A domain of the guest there still
    proves the failover: before the protection the backup had no such domain, and a standby does not
    survive a restart of its host.
    """
    if theirs.outcome == ProtectionOutcome.FAILED_OVER:
        return True
    return _has_forgotten(ours, theirs) and bool(theirs.runs or theirs.known)


def is_unclear(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    """Return whether the backup may have taken over and its libvirt does not answer. Pure."""
    return _has_forgotten(ours, theirs) and theirs.libvirt_silent


def _has_forgotten(ours: ProtectionStatus, theirs: ProtectionStatus) -> bool:
    return theirs.knows_nothing and not ours.runs


async def give_back(known: Known) -> None:
    """Revoke the protection's lease, if any, and its database login. Raises VmckptError."""
    if known.lease is not None:
        from vmckpt.lease import client  # noqa: PLC0415 - loading psycopg takes 0.1 s

        await asyncio.to_thread(
            client.revoke, known.lease, known.uuid, force=True, session=known.session
        )


async def planned(known: Known, caller: Caller) -> StopResult:
    """Switch the guest over to the backup without loss.

    Raises GuestLocked if the standby is not ready; OutcomeUnknown, VmckptError.
    """
    began = time.monotonic()
    with attended(known, caller) as recorder:
        told = await agent_client.status(known.primary, known.uuid)
        if told.phase != "protecting" or told.wants_leave:
            raise GuestLocked(
                f"the standby of {known.operation.guest} is not ready: {_said(told)}",
                hint=f"run vmckpt status {known.operation.guest} until it shows the standby as"
                " ready, then try again",
            )
        await agent_client.request(known.primary, known.uuid, wish="planned")
        found = await _until_runs(known, caller)
        return await _failed_over(known, recorder, found, Seconds(time.monotonic() - began))


async def failover(
    known: Known, caller: Caller, *, dead: bool = False, fence: bool = False,
    case: Case | None = None,
) -> StopResult:  # fmt: skip
    """Run the guest on the backup because the primary is dead.

    `dead`: the operator states that the primary's host is off. `fence`: power that host off, even
    if it answers. Without a lease store and without `dead`, a silent host that has a fence agent is
    powered off as well; with a lease store the lease decides. `case`: the state that `seen`
    returned a moment ago. The facts in it that matter are either enforced here or cannot change.

    Raises GuestLocked, BadInput, FencingFailed, LeaseLost, OutcomeUnknown, VmckptError.
    """
    began = time.monotonic()
    with attended(known, caller) as recorder:
        if case is None:
            case = await seen(known, dead=dead, fence=fence)
        elif known.watched:  # from now on no other controller grants permissions
            case = replace(case, alone=bool(await solo_permission.alone(known.operation.id)))
        why, fenced = host_death.decide(case), None
        age = case.theirs.epoch_age
        if why in (Proof.FENCE, Proof.GONE) and age is not None:
            caller.warn(
                f"{case.guest} will resume from the state it had {show_seconds(age)} ago; later"
                " changes are lost"
            )
        if why is Proof.FENCE:
            fenced = await fence_host(known.primary, recorder, caller)
        if known.watched:  # a controller that took the job over may have granted a permission
            JournalStepLog(recorder).check()
        if why is Proof.LEASE and case.gone and case.theirs.ready:
            with suppress(VmckptError):  # the lease expires, or the takeover is refused
                await agent_client.order(known.primary, known.uuid, "give", owner=known.session)
        if why is not Proof.RUNS:
            await agent_client.request(known.backup, known.uuid, wish="failover")
        found = await _until_runs(known, caller)
        took = Seconds(time.monotonic() - began)
        sure = f"{case.primary} reports the guest as not running" if why is Proof.GONE else None
        return await _failed_over(known, recorder, found, took, fenced=fenced, sure=sure)


async def seen(known: Known, *, dead: bool = False, fence: bool = False) -> Case:
    """Return both agents' answers, with the permissions in the journal.

    `dead`, `fence`: see `failover`. Raises JournalError.
    """
    ours, theirs = await asyncio.gather(
        agent_client.status(known.primary, known.uuid),
        agent_client.status(known.backup, known.uuid),
    )
    if ours.error is not None and theirs.error is None:
        # The backup may have received a heartbeat meanwhile.
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
                f"{known.operation.guest} is not running on {known.backup.name} yet: {says}",
                host=known.backup.name,
                hint=f"run vmckpt status {known.operation.guest}",
            )
        await asyncio.sleep(_TURN)


async def _failed_over(
    known: Known, recorder: Recorder, told: ProtectionStatus, took: Seconds, *,
    fenced: Fenced | None = None, sure: str | None = None,
) -> StopResult:  # fmt: skip
    """Clean up once the guest is running on the backup, and record the end of the protection.

    `sure`: why the guest cannot be running on any other host; None: use the reason that the backup
    reports.
    """
    guest, why = known.operation.guest, str(told.why)
    await tidy(known, off=fenced is not None)
    report: dict[str, Any] = {"failed_over": known.backup.name, "why": why}
    if fenced is not None:
        sure = f"{fenced.agent} reports that {fenced.host} is off"
        report["fenced"] = fenced.as_json()
    if sure is not None:
        # The backup only reports that the controller declared the primary dead, not the proof.
        report["why"] = why = sure + "".join(why.partition(";")[1:])
    recorder.finish(Outcome.COMPLETED, report)
    return StopResult(guest=guest, runs_on=known.backup.name, why=why, took=took, fenced=fenced)


async def tidy(known: Known, *, off: bool = False) -> None:
    """Remove the agents' files from both hosts after a failover, and revoke the lease.

    `off`: the primary is off and is not queried. A primary that does not answer keeps its files.
    Raises TwoCopies, VmckptError.
    """
    if not off:
        try:
            await agent_client.order(
                known.primary, known.uuid, "end", owner=known.session, define=False,
                standby_gone=True, state=agent_client.kept_in(known.primary, known.uuid),
            )  # fmt: skip
        except TwoCopies:
            raise
        except VmckptError:
            pass  # the files stay until that host restarts
    await agent_client.order(known.backup, known.uuid, "end", owner=known.session)
    await give_back(known)


def _said(told: ProtectionStatus) -> str:
    return str(told.says or told.error or told.phase or "no reason reported")
