"""Leases on schedules, kept in the journal, so that only one service runs each schedule.

The service is a job in the journal like any other: `vmckpt jobs` shows it and `vmckpt cancel` stops
it. If a service is killed, the next service that starts recovers its job.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from enum import StrEnum

from vmckpt.errors import GuestLocked, JournalError, LeaseLost
from vmckpt.journal import recorder as journal
from vmckpt.journal.records import NewOperation, RequestKind
from vmckpt.model.events import Event
from vmckpt.model.migration import Outcome

KIND = "run"
VIGIL = "vigil"
"""Name of the lease on the failure detector, which only one service may run."""
PAGES = "pages"
"""Name of the lease that lets only one of several services send alerts."""
_AGAIN = 20.0


class LeaseOwner(StrEnum):
    """The owner of a task that only one service may perform."""

    OURS = "ours"
    ANOTHERS = "another's"
    """Another live service owns the task."""
    UNSURE = "unsure"
    """The owner is dead and not recovered yet, this service has lost its leases, or the journal
    cannot be used."""


def lease_of(one: str) -> str:
    """Return the name of the lease on a task, such as a schedule ("policy/schedule")."""
    return f"schedule/{one}"


class ScheduleLeases:
    """The leases of one service, held until `end`. The methods block: call them in a thread."""

    def __init__(self, host: str, warn: Callable[[str], None]) -> None:
        """Begin the service's job. Raises JournalError."""
        new = NewOperation(kind=KIND, guest="schedules", source=host)
        self._recorder = journal.begin(new, warn)
        self._warn = warn
        self._mine: set[str] = set()
        self._others: dict[str, tuple[float, LeaseOwner]] = {}
        """Leases held by other services: when each was last checked, and its owner."""
        self.stale = False
        """Whether a dead service still holds any of the leases."""

    @property
    def job(self) -> str | None:
        """The job's ID; None without a journal."""
        return self._recorder.id

    def claim(self, schedules: Collection[str]) -> frozenset[str]:
        """Acquire leases on schedules ("policy/schedule").

        Returns those of `schedules` that this service has a lease on, new or acquired earlier.
        Raises LeaseLost.
        """
        self._recorder.check()
        for one in sorted(set(schedules) - self._mine):
            if one in self._others and time.monotonic() - self._others[one][0] < _AGAIN:
                continue
            try:
                self._recorder.acquire(lease_of(one))
            except (GuestLocked, JournalError) as exc:
                # A dead service keeps its leases until it is recovered.
                dead = isinstance(exc, GuestLocked) and exc.interrupted
                self.stale = self.stale or dead
                if one not in self._others:
                    self._warn(f"this service is not responsible for {_named(one)}: {exc.message}")
                lives = isinstance(exc, GuestLocked) and not dead
                self._others[one] = (
                    time.monotonic(),
                    LeaseOwner.ANOTHERS if lives else LeaseOwner.UNSURE,
                )
            else:
                self._mine.add(one)
                if self._others.pop(one, None) is not None:
                    self._warn(f"this service is now responsible for {_named(one)}")
        return frozenset(self._mine.intersection(schedules))

    def owner_of(self, one: str) -> LeaseOwner:
        """Return the owner of a lease. Acquires the lease if it has no other known owner."""
        try:
            if one in self.claim({one}):
                return LeaseOwner.OURS if self.holds else LeaseOwner.UNSURE
        except LeaseLost:
            return LeaseOwner.UNSURE
        # Another thread may have acquired the lease meanwhile.
        return self._others.get(one, (0.0, LeaseOwner.UNSURE))[1]

    def report(self, event: Event) -> None:
        """Record an event of the service's job. Returns immediately."""
        self._recorder.take(event)

    def settled(self) -> None:
        """Record that dead services were recovered, so that `claim` retries their leases now."""
        self.stale = False
        for one, (_, whose) in list(self._others.items()):
            self._others[one] = time.monotonic() - _AGAIN, whose

    @property
    def holds(self) -> bool:
        """Whether the leases are still valid."""
        return self._recorder.holds

    def cancelled(self) -> bool:
        """Answer requests from other terminals. Returns whether one of them cancels the service."""
        found = False
        for request in self._recorder.take_requests():
            cancels = request.kind == RequestKind.CANCEL
            text = "stopping" if cancels else "a schedule service does not support this request"
            self._recorder.answer(request, ok=cancels, text=text)
            found = found or cancels
        return found

    async def end(self) -> None:
        """End the service's job, which releases all leases."""
        self._recorder.finish(Outcome.COMPLETED, None)
        await asyncio.to_thread(self._recorder.close)


_NAMES = {VIGIL: "the failure detector", PAGES: "the alerts"}


def _named(one: str) -> str:
    return _NAMES.get(one, f"schedule {one}")
