"""Move a guest's standby to another host, so that the standby's current host becomes empty.

A guest has only one standby at a time, so the old standby is removed before the new standby is
created. Until the first copy is complete, no host can take over.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import BadInput, Blocked, Cancelled, VmckptError
from vmckpt.model.events import Caller
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.host import Host
from vmckpt.policy.model import Failover, Protection
from vmckpt.protection import start, stop
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.request import Protected, ProtectRequest, Setting
from vmckpt.protection.stop import Known
from vmckpt.units import Bytes, Seconds, show_seconds

_TRIES = 3
_AGAIN = Seconds(5.0)
STANDS_STILL = Seconds(120.0)
"""The first copy is aborted after this long without progress, since no operator may be present to
press Ctrl-C."""
_MOVES = ("phase", "pages_left", "disks_compared_bytes", "disks_sent_bytes", "disks_ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """A protection, and the host to which its standby is to move."""

    known: Known
    backup: Host
    lease: str | None
    """The lease store in the inventory; None if the inventory has no lease store."""
    usual: Protection
    """Terms for a protection whose own terms are not in the journal or cannot be read."""
    memory: Bytes
    """Size of the guest's memory. On the guest's host, the current protection uses the same amount
    of memory again, and frees it when the protection ends."""

    @property
    def guest(self) -> str:
        return self.known.operation.guest

    @property
    def setting(self) -> Setting:
        return Setting(primary=self.known.primary, backup=self.backup, lease=self.lease)

    @property
    def terms(self) -> Protection:
        """The terms of the current protection."""
        told = self.known.operation.detail
        with suppress(KeyError, TypeError, ValueError):
            return Protection.from_json(told["terms"])
        automatic = Failover.AUTOMATIC if told.get("automatic") else Failover.MANUAL
        return replace(self.usual, failover=automatic)

    @property
    def request(self) -> ProtectRequest:
        """The request for the new standby; its images go to the new host's default directory."""
        return ProtectRequest(guest=self.guest, to=self.backup.name, terms=self.terms)

    @property
    def words(self) -> str:
        """The command that has the same effect."""
        terms = self.terms
        every = "auto" if terms.interval is None else show_seconds(terms.interval).replace(" ", "")
        how = f"--failover {terms.failover} --interval {every}"
        return f"vmckpt protect {self.guest} --to {self.backup.name} {how}"


async def require_relocatable(anew: Relocation, caller: Caller) -> Protected:
    """Return the plan of the new protection, with all findings. Raises VmckptError."""
    request = replace(anew.request, dry_run=True, held=anew.memory)
    found = await start.protect(anew.setting, request, caller, lambda _: None)
    bare = Finding(
        code="no-standby", severity=Severity.WARNING, where=anew.guest,
        text=f"{anew.guest} has no standby until its memory and disks are copied", hint=None,
    )  # fmt: skip
    return replace(found, findings=(*found.findings, bare))


async def move(anew: Relocation, caller: Caller) -> Protected:
    """End the current protection and begin a new one. Returns when the new standby is ready.

    Raises VmckptError; the guest keeps running, but may have no standby.
    """
    ended = await stop.unprotect(anew.known, caller)
    if ended.runs_on != anew.known.primary.name:
        raise BadInput(
            f"{ended.guest} failed over to {ended.runs_on} and has no standby",
            hint=f"run vmckpt protect {ended.guest} --to HOST",
        )
    for left in reversed(range(_TRIES)):
        try:
            return await _begun(anew, caller)
        except Cancelled:
            raise
        except VmckptError as exc:
            if not left or caller.stop.is_set():
                raise
            caller.warn(f"{anew.guest} has no standby: {exc.message}; retrying")
            await asyncio.sleep(_AGAIN)
    raise AssertionError("the last try returns or raises")


async def _begun(anew: Relocation, caller: Caller) -> Protected:
    done = await start.protect(anew.setting, anew.request, caller, progressing(time.monotonic))
    if done.job is None:
        against = [one for one in done.findings if one.severity is Severity.BLOCKER]
        where = against[0].where  # a host; or the guest, and then no host is at fault
        raise Blocked(f"{where}: {against[0].text}", host=where, hint=against[0].hint)
    return done


def progressing(clock: Callable[[], float]) -> start.Told:
    """Return a callback that raises VmckptError after STANDS_STILL without progress."""
    last: tuple[Any, ...] = ()
    since = clock()

    def told(status: ProtectionStatus) -> None:
        nonlocal last, since
        here = tuple(status.told.get(name) for name in _MOVES)
        if here != last:
            last, since = here, clock()
        elif clock() - since > STANDS_STILL:
            why = status.says or status.error or f"its phase is {status.phase}"
            raise VmckptError(
                f"the first copy made no progress for {show_seconds(STANDS_STILL)}: {why}"
            )

    return told
