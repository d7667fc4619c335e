"""Which schedules this service has: a lease of the journal on each, so that no two take both.

The service is an operation of the journal like any other: `vmckpt jobs` shows it, `vmckpt cancel`
ends it, and one that was killed is settled by the next that begins (`recover`).
"""

import asyncio
import time
from collections.abc import Callable, Collection

from vmckpt.errors import GuestBusy, JournalError
from vmckpt.journal import recorder as journal
from vmckpt.journal.records import NewOperation, RequestKind
from vmckpt.model.jobs import Outcome

KIND, WATCHES = "run", "watches"
_AGAIN = 20.0
_RECOVER = "run vmckpt recover"


class Claims:
    """The leases of one service; a context manager. Its methods are for a thread."""

    def __init__(self, host: str, warn: Callable[[str], None], *, watches: bool = False) -> None:
        """Begins the operation. `watches`: over protected guests, too. Raises JournalError."""
        new = NewOperation(kind=KIND, guest="schedules", source=host, detail={WATCHES: watches})
        self._recorder = journal.begin(new, warn)
        self._warn = warn
        self._mine: set[str] = set()
        self._others: dict[str, float] = {}
        """Those that somebody else has, and when that was looked at."""
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
            if time.monotonic() - self._others.get(one, -_AGAIN) < _AGAIN:
                continue
            try:
                self._recorder.acquire(f"schedule/{one}")
            except (GuestBusy, JournalError) as exc:
                # One that is dead keeps its leases until it is settled.
                self.stale = self.stale or exc.mend == _RECOVER
                if one not in self._others:
                    self._warn(f"schedule {one} is left to another service: {exc.message}")
                self._others[one] = time.monotonic()
            else:
                self._mine.add(one)
                if self._others.pop(one, None) is not None:
                    self._warn(f"schedule {one} is this service's now")
        return frozenset(self._mine.intersection(schedules))

    def settled(self) -> None:
        """The dead were seen to: theirs are asked for at once."""
        self.stale = False
        self._others = dict.fromkeys(self._others, -_AGAIN)

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
