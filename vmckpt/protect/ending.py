"""How a protection ends by somebody's wish: taken away, switched over, or failed over."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import BadInput, GuestBusy, OutcomeUnknown, RemoteError, VmckptError
from vmckpt.journal import desk, takeover
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation
from vmckpt.lease import witness
from vmckpt.model.callers import Caller
from vmckpt.model.hosts import Host
from vmckpt.model.jobs import Outcome
from vmckpt.protect import asking
from vmckpt.units import Seconds

_TURN = 0.05
_SWITCHES = Seconds(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came of it."""

    guest: str
    runs_on: str
    why: str
    took: Seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "runs_on": self.runs_on, "why": self.why, "took": self.took,
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


@contextmanager
def attended(known: Known, caller: Caller) -> Iterator[Recorder]:
    """Be its controller, so that nobody else acts on the guest; left to the agents afterwards,
    unless it was written down that it has ended. Raises GuestBusy, JournalError."""
    with (
        desk.open_journal() as journal,
        takeover.taken_over(
            journal, journal.operation(known.operation.id), caller.warn
        ) as recorder,
    ):
        recorder.entrust(known.primary.name)
        yield recorder


async def unprotect(known: Known, caller: Caller) -> Ended:
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
            done = await put_back(known)
        for line in done.did:
            caller.warn(line)
        took = Seconds(time.monotonic() - began)
        if done.standby_gone:
            recorder.finish(Outcome.COMPLETED, {"unprotected": True, "runs_on": runs_on.name})
        else:
            caller.warn("once that host is back, run vmckpt unprotect again")
    return Ended(guest=known.operation.guest, runs_on=runs_on.name, why="asked for", took=took)


@dataclass(frozen=True, slots=True)
class PutBack:
    """What was done on both hosts."""

    did: tuple[str, ...]
    standby_gone: bool
    """False: it waits on a host that does not answer, and can never take over."""


async def put_back(known: Known) -> PutBack:
    """End both sides of a protection whose guest runs on the primary.

    The standby goes first: once it is gone nothing can take over. Where its host is silent the
    primary sees to that with the lease store. Raises VmckptError.
    """
    did, gone = [], True
    try:
        told = await asking.order(known.backup, known.uuid, "end", owner=known.session)
        did += [f"{known.backup.name}: {line}" for line in told["did"]]
    except RemoteError as exc:
        if known.lease is None:
            raise
        gone = False
        did.append(f"{known.backup.name}: its standby is left there: {exc.message}")
    told = await asking.order(
        known.primary, known.uuid, "end", standby_gone=gone, owner=known.session,
        state=_state(known),
    )  # fmt: skip
    did += [f"{known.primary.name}: {line}" for line in told["did"]]
    await give_back(known)
    return PutBack(did=tuple(did), standby_gone=gone)


async def where(known: Known) -> Host:
    """Where the guest runs by what the agents say. A silent backup with a lease is the primary's
    to find out about. Raises VmckptError if nobody can know."""
    try:
        backup = await asking.order(known.backup, known.uuid, "ask")
    except RemoteError:
        if known.lease is None:
            raise
        return known.primary
    if backup.get("outcome") == "failed-over":
        return known.backup
    return known.primary


async def give_back(known: Known) -> None:
    """End the lease and its login. Raises VmckptError."""
    if known.lease is not None:
        await asyncio.to_thread(
            witness.revoke, known.lease, known.uuid, force=True, session=known.session
        )


async def planned(known: Known, caller: Caller) -> Ended:
    """Let the guest run on the backup, without loss. Raises VmckptError, OutcomeUnknown."""
    began = time.monotonic()
    with attended(known, caller) as recorder:
        told = await asking.status(known.primary, known.uuid)
        if told.get("phase") != "protecting":
            raise GuestBusy(
                f"{known.operation.guest}: its standby is not ready: {_said(told)}",
                mend="wait until it is: vmckpt status",
            )
        await asking.order(known.primary, known.uuid, "ask", wish="planned")
        found = await _until_runs(known, caller)
        return await _failed_over(known, recorder, found, Seconds(time.monotonic() - began))


async def failover(known: Known, caller: Caller, *, dead: bool) -> Ended:
    """Let the guest run on the backup because the primary is dead: `dead`, if a person says so.

    With a lease store the lease decides. Raises GuestBusy, OutcomeUnknown, VmckptError.
    """
    began = time.monotonic()
    with attended(known, caller) as recorder:
        ours, theirs = await asyncio.gather(
            asking.status(known.primary, known.uuid), asking.status(known.backup, known.uuid)
        )
        if (
            "error" not in ours
            and ours.get("runs")
            and (theirs.get("connected") or not known.lease)
        ):
            raise GuestBusy(
                f"{known.operation.guest} runs on {known.primary.name}, which answers",
                mend=f"vmckpt failover {known.operation.guest} --planned switches without loss",
            )
        if known.lease is None and not dead:
            raise BadInput(
                f"{known.primary.name} is silent, and without a lease store nobody but you can"
                " know that it is dead",
                mend="switch it off, then add --host-is-off",
            )
        if theirs.get("outcome") != "failed-over":
            await asking.order(known.backup, known.uuid, "ask", wish="failover")
        found = await _until_runs(known, caller)
        return await _failed_over(known, recorder, found, Seconds(time.monotonic() - began))


async def _until_runs(known: Known, caller: Caller) -> Mapping[str, Any]:
    give_up = time.monotonic() + _SWITCHES
    said = ""
    while True:
        told = await asking.status(known.backup, known.uuid)
        if told.get("outcome") == "failed-over":
            return told
        if (says := _said(told)) != said:
            said = says
            caller.warn(f"{known.backup.name}: {says}")
        if time.monotonic() > give_up or caller.stop.is_set():
            raise OutcomeUnknown(
                f"{known.operation.guest} does not run on {known.backup.name} yet: {says}",
                host=known.backup.name,
                mend="see vmckpt status",
            )
        await asyncio.sleep(_TURN)


async def _failed_over(
    known: Known, recorder: Recorder, told: Mapping[str, Any], took: Seconds
) -> Ended:
    """The guest runs on the backup: what is left of the protection goes."""
    guest = known.operation.guest
    await tidy(known)
    recorder.finish(Outcome.COMPLETED, {"failed_over": known.backup.name, "why": told.get("why")})
    return Ended(guest=guest, runs_on=known.backup.name, why=str(told.get("why")), took=took)


async def tidy(known: Known) -> None:
    """After a failover: the agents' files go, where hosts answer; and the lease."""
    with suppress(VmckptError):
        await asking.order(
            known.primary, known.uuid, "end", owner=known.session, define=False, standby_gone=True,
            state=_state(known),
        )  # fmt: skip
    await asking.order(known.backup, known.uuid, "end", owner=known.session)
    await give_back(known)


def _state(known: Known) -> str:
    """Where the primary keeps what outlives a reboot."""
    return f"{known.primary.agent_state}/replica-{known.uuid}"


def _said(told: Mapping[str, Any]) -> str:
    return str(told.get("says") or told.get("error") or told.get("phase") or "it says nothing")
