"""Which schedules this service has: a lease of the journal on each, so that no two take both.

The service is an operation of the journal like any other: `vmckpt jobs` shows it, `vmckpt cancel`
ends it, and one that was killed is settled by the next that begins (`recover`).
"""

import asyncio
import time
from collections.abc import Callable, Collection
from enum import StrEnum

from vmckpt.errors import GuestLocked, JournalError, LeaseLost
from vmckpt.journal import recorder as journal
from vmckpt.journal.records import NewOperation, RequestKind
from vmckpt.model.migration import Outcome

KIND = "run"
VIGIL = "vigil"
"""What a service claims so that of several one alone keeps watch over protected guests."""
_AGAIN = 20.0
_RECOVER = "run vmckpt recover"


class LeaseOwner(StrEnum):
    """Whose something is that one service alone may do."""

    OURS = "ours"
    ANOTHERS = "another's"
    """A service has it that lives."""
    UNSURE = "unsure"
    """Its holder is dead and not settled, or the journal does not answer."""


def lease_of(one: str) -> str:
    """The lease on a schedule ("policy/schedule"), or on what else one service does alone."""
    return f"schedule/{one}"


class ScheduleLeases:
    """The leases of one service; a context manager. Its methods are for a thread."""

    def __init__(self, host: str, warn: Callable[[str], None]) -> None:
        """Begins the operation. Raises JournalError."""
        new = NewOperation(kind=KIND, guest="schedules", source=host)
        self._recorder = journal.begin(new, warn)
        self._warn = warn
        self._mine: set[str] = set()
        self._others: dict[str, tuple[float, LeaseOwner]] = {}
        """Those that are not ours, when that was looked at, and whose they were."""
        self.stale = False
        """Somebody who is dead has some."""

    @property
    def job(self) -> str | None:
        """The operation's id; None without a journal."""
        return self._recorder.id

    def claim(self, schedules: Collection[str]) -> frozenset[str]:
        """Those of them ("policy/schedule") that are this service's. Raises LeaseLost."""
        self._recorder.check()
        for one in sorted(set(schedules) - self._mine):
            if one in self._others and time.monotonic() - self._others[one][0] < _AGAIN:
                continue
            try:
                self._recorder.acquire(lease_of(one))
            except (GuestLocked, JournalError) as exc:
                # One that is dead keeps its leases until it is settled.
                dead = exc.hint == _RECOVER
                self.stale = self.stale or dead
                if one not in self._others:
                    self._warn(f"schedule {one} is left to another service: {exc.message}")
                lives = isinstance(exc, GuestLocked) and not dead
                self._others[one] = (
                    time.monotonic(),
                    LeaseOwner.ANOTHERS if lives else LeaseOwner.UNSURE,
                )
            else:
                self._mine.add(one)
                if self._others.pop(one, None) is not None:
                    self._warn(f"schedule {one} is this service's now")
        return frozenset(self._mine.intersection(schedules))

    def owner_of(self, one: str) -> LeaseOwner:
        """Whose it is; asks for it if nobody is known to have it."""
        try:
            if one in self.claim({one}):
                return LeaseOwner.OURS if self.holds else LeaseOwner.UNSURE
        except LeaseLost:
            return LeaseOwner.UNSURE
        # Another thread may have got it in between.
        return self._others.get(one, (0.0, LeaseOwner.UNSURE))[1]

    def settled(self) -> None:
        """The dead were seen to: theirs are asked for at once."""
        self.stale = False
        for one, (_, whose) in list(self._others.items()):
            self._others[one] = time.monotonic() - _AGAIN, whose

    @property
    def holds(self) -> bool:
        """Whether the leases are still good."""
        return self._recorder.holds

    def cancelled(self) -> bool:
        """Whether somebody asked for the end, from another terminal."""
        found = False
        for request in self._recorder.take_requests():
            cancels = request.kind == RequestKind.CANCEL
            text = "stopping" if cancels else "a service of snapshots knows no such thing"
            self._recorder.answer(request, ok=cancels, text=text)
            found = found or cancels
        return found

    async def end(self) -> None:
        """Give all back."""
        self._recorder.finish(Outcome.COMPLETED, None)
        await asyncio.to_thread(self._recorder.close)
