"""Follow all operations in a journal: their start, events and end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmckpt.journal import wording
from vmckpt.journal.records import Operation, StoredEvent, utc

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal

BEGAN, ENDED = "began", "ended"
WORK_FAILED, WORK_DONE = "work-failed", "work-done"
"""Kinds of the events model.events.WorkFailed and WorkDone."""
_LATE = 60.0
"""Maximum delay, in seconds, from a transaction's timestamp until the transaction becomes visible.
PostgreSQL's `now()` is the time at which the transaction began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event of an operation, or the operation's beginning or end."""

    at: float
    """When the event occurred, in seconds since 1970."""
    kind: str
    """"began", "ended", or the kind of an event: "decided", "phase-changed", …"""
    operation: Operation
    """The operation, as it was when this event was read."""
    values: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        one = self.operation
        return {
            "at": utc(self.at), "event": self.kind, "job": one.id, "kind": one.kind,
            "guest": one.guest, "guest_uuid": one.guest_uuid, "source": one.source,
            "target": one.target, "policy": one.policy, "values": dict(self.values),
        }  # fmt: skip

    @property
    def text(self) -> str | None:
        """One line of text; None if the event is not worth showing."""
        one = self.operation
        if self.kind == BEGAN:
            return f"{one.kind} started by {one.asked_by}"
        if self.kind == ENDED:
            error = self.values["error"]
            return f"{one.kind} ended: {self.values['outcome']}" + (f": {error}" if error else "")
        return wording.event(self.kind, self.values)


class Follower:
    """Follows all operations. Each call of `look` returns what has happened since the last call.

    The methods block, so call them in a thread.
    """

    def __init__(self, journal: "Journal", since: float | None = None) -> None:
        """`since`: seconds since 1970 by the journal's clock; None: now. Raises JournalError."""
        self._journal = journal
        self._from = journal.now() if since is None else since
        self._first = True
        self._told: dict[str, int] = {}
        """Number of the last event returned for each active operation."""
        self._ended: dict[str, float] = {}

    def look(self) -> list[Happening]:
        """Return all events since the last call, the oldest first.

        Raises JournalError. After an error, the next call also returns the events that this call
        would have returned.
        """
        journal, now = self._journal, self._journal.now()
        # Operations are read before events, because no event follows the end of an operation.
        found = {one.id: one for one in journal.operations(active=True)}
        # An operation that ended between the two queries counts as ended.
        found |= {one.id: one for one in journal.ended(self._from - _LATE)}
        new = [one for one in found.values() if one.id not in self._ended]
        last = journal.last_events([one.id for one in new])
        told: list[Happening] = []
        for one in new:
            after = self._told.get(one.id, 0)
            events = journal.events(one.id, after) if last.get(one.id, 0) > after else []
            told += self._of(one, events)
            last[one.id] = max(after, events[-1].seq if events else 0)
        self._remember(new, last, now)
        return sorted(told, key=lambda one: one.at)

    def _of(self, one: Operation, events: list[StoredEvent]) -> list[Happening]:
        """Return the new events of one operation, including its beginning and its end."""
        told = [] if one.id in self._told else [_happened(one, one.began_at, BEGAN, {})]
        told += [_happened(one, one.began_at + e.at, e.kind, e.values) for e in events]
        if (end := _end(one)) is not None:
            told.append(end)
        # The first call of `look` also reads events from before `since`.
        return [each for each in told if not self._first or each.at >= self._from]

    def _remember(self, seen: list[Operation], last: Mapping[str, int], now: float) -> None:
        for one in seen:
            if one.ended_at is None:
                self._told[one.id] = last[one.id]
            else:
                self._told.pop(one.id, None)
                self._ended[one.id] = one.ended_at
        self._first, self._from = False, now
        self._ended = {id_: at for id_, at in self._ended.items() if at >= now - 2 * _LATE}


def past(journal: "Journal", since: float) -> list[Happening]:
    """Return the ends of operations since a time, and the beginnings of active operations.

    The oldest come first. `since`: seconds since 1970. Raises JournalError.
    """
    begun = [_happened(one, one.began_at, BEGAN, {}) for one in journal.operations(active=True)]
    ended = [one for op in journal.ended(since) if (one := _end(op)) is not None]
    return sorted([*begun, *ended], key=lambda one: one.at)


def _end(one: Operation) -> Happening | None:
    if one.ended_at is None:
        return None
    error = (one.report or {}).get("error")
    return _happened(one, one.ended_at, ENDED, {"outcome": one.outcome, "error": error})


def _happened(one: Operation, at: float, kind: str, values: Mapping[str, Any]) -> Happening:
    return Happening(at=at, kind=kind, operation=one, values=values)
