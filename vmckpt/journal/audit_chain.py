"""The hash chain of the audit trail, and its verification. Pure.

The digest of an entry covers all its fields and the digest of the previous entry. An edited,
removed, inserted or reordered entry therefore breaks the chain. The digest of the last entry, the
head, stands for the whole trail. The chain has no key: a process that can write to the database can
compute a new chain. Only a copy of the head in another place detects that, or a removed end.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from typing import Any

from vmckpt.journal.records import utc

START = "0" * 64
"""The previous digest of the first entry."""


class What(StrEnum):
    """What happened."""

    BEGAN = "began"
    TAKEN_OVER = "taken-over"
    """Another process became the controller of the operation."""
    REQUESTED = "requested"
    """Another command sent a request, such as "cancel", to the operation."""
    INTENDED = "intended"
    """A step was about to be taken."""
    CONCLUDED = "concluded"
    """The step ended, or its state was determined."""
    ENDED = "ended"
    """The operation ended, and all its open steps with it."""
    ALLOWED = "allowed"
    """A command that is no job, such as "snapshot delete", was allowed to start. The operator may
    still have answered "no", and the command may have failed."""
    REFUSED = "refused"
    """The user lacked the role that the command needs. The entry has no job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The process that did it, and the user whose rights the process had."""

    uid: int
    """The real user ID, from the kernel."""
    user: str
    """The name of this user."""
    sudo_user: str | None
    """The user that became root with sudo or su: a hint, which root can forge."""
    command: str
    """The command, such as "vmckpt migrate"; of another program, the program's name."""
    host: str
    """The name of the controller's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What happened to a job."""

    what: str
    """One of `What`; of an edited entry, any text."""
    job: str | None
    kind: str | None
    guest: str | None
    source: str | None
    target: str | None
    step: str | None = None
    """The name of the step or of the request, or a command that is no job."""
    outcome: str | None = None
    """The outcome of the job, or the state of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFact:
    """What an entry of the audit trail records."""

    at_ms: int
    """Milliseconds since 1970 (UTC): an integer has the same digits in every database."""
    actor: Actor
    deed: Deed


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last entry of a trail, as recorded in another place."""

    seq: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One entry of the audit trail, as stored."""

    seq: int
    """1, 2, … without gaps."""
    fact: AuditFact
    previous: str
    digest: str

    def as_json(self) -> dict[str, Any]:
        """Return the object that `vmckpt audit list --json` prints."""
        fields = {
            "seq": self.seq,
            "at_ms": self.fact.at_ms,
            **asdict(self.fact.actor),
            **asdict(self.fact.deed),
            "previous": self.previous,
            "digest": self.digest,
        }
        # An edited entry may contain values of any type.
        whole = {name: fields.pop(name) for name in ("seq", "at_ms", "uid")}
        return {
            "at": _utc(self.fact.at_ms),
            **{name: one if isinstance(one, int) else None for name, one in whole.items()},
            **{name: None if one is None else str(one) for name, one in fields.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The first entry at which the chain is broken."""

    seq: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a verification."""

    entries: int
    """Number of entries before the end or before the first broken entry."""
    head: str
    """The digest of the last of these entries; START if there are none."""
    broken: Broken | None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `vmckpt audit verify --json` prints."""
        broken = None if self.broken is None else asdict(self.broken)
        return {"entries": self.entries, "head": self.head, "broken": broken}


def digest(seq: int, fact: AuditFact, previous: str) -> str:
    """Return the SHA-256 digest of an entry, as hex digits."""
    fields = [seq, fact.at_ms, *astuple(fact.actor), *astuple(fact.deed), previous]
    # A JSON list separates the fields unambiguously, and null differs from an empty text. Only
    # edited fields have other types.
    text = json.dumps(fields, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def following(head: Head | None, fact: AuditFact) -> AuditEntry:
    """Return the entry that appends `fact` after the head; None: the trail is empty."""
    seq, previous = (1, START) if head is None else (head.seq + 1, head.digest)
    return AuditEntry(seq=seq, fact=fact, previous=previous, digest=digest(seq, fact, previous))


def verify(
    entries: Iterable[AuditEntry], known_head: str | None = None, recorded: Head | None = None
) -> Verified:
    """Verify the chain, and find the first broken entry.

    `entries`: all entries, sorted by number. `known_head`: a head that was kept in another place.
    It may be older than the trail's head; if no entry has this digest, the end of the trail was
    removed or the trail was rewritten. `recorded`: the head that the journal recorded before the
    entries were read.
    """
    last: AuditEntry | None = None
    found = known_head in (None, START)
    for entry in entries:
        if (why := _fault(last, entry)) is not None:
            return _result(last, Broken(seq=entry.seq, why=why))
        if recorded is not None and entry.seq == recorded.seq and entry.digest != recorded.digest:
            why = "the entry differs from the head that the journal recorded: it was replaced"
            return _result(last, Broken(seq=entry.seq, why=why))
        last = entry
        found = found or entry.digest == known_head
    seq = 1 if last is None else last.seq + 1
    if recorded is not None and recorded.seq >= seq:
        those = (
            f"entries {seq} to {recorded.seq} were" if recorded.seq > seq else f"entry {seq} was"
        )
        return _result(last, Broken(seq=seq, why=f"{those} removed from the end"))
    if found:
        return _result(last, None)
    why = "no entry has the known head: the end was removed, or the trail was rewritten"
    return _result(last, Broken(seq=seq, why=why))


def _fault(last: AuditEntry | None, entry: AuditEntry) -> str | None:
    expected, previous = (1, START) if last is None else (last.seq + 1, last.digest)
    seq: Any = entry.seq  # SQLite stores any type in any column
    if not isinstance(seq, int):
        return "the number is invalid"
    if entry.seq < expected:
        return f"number {entry.seq} is used twice or is invalid"
    if entry.seq > expected:
        if entry.seq == expected + 1:
            return f"entry {expected} was removed"
        return f"entries {expected} to {entry.seq - 1} were removed"
    if entry.digest != digest(entry.seq, entry.fact, entry.previous):
        return "the entry was edited"
    if entry.previous != previous:
        return "the entry does not follow the previous entry: one of them was replaced"
    return None


def _utc(at_ms: int) -> str | None:
    """Format a time; None for a time that was edited and is invalid."""
    try:
        return utc(at_ms / 1000)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _result(last: AuditEntry | None, broken: Broken | None) -> Verified:
    if last is None:
        return Verified(entries=0, head=START, broken=broken)
    return Verified(entries=last.seq, head=last.digest, broken=broken)
