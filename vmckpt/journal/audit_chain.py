"""The hash chain of the audit trail, and its verification. Pure.

The digest of an entry covers all its fields and the digest of the previous entry. An edited,
removed, inserted or reordered entry therefore breaks the chain. The digest of the last entry, the
head, stands for the whole trail. The chain has no key: a process that can write to the database can
compute a new chain. Only a copy of the head in another place detects that, or a removed end.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

START = "0" * 64
"""The previous digest of the first entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFact:
    """What an entry of the audit trail records."""

    at_ms: int
    """Milliseconds since 1970 (UTC): an integer has the same digits in every database."""
    user: str
    """The user that started the operation, as user@host."""
    controller_host: str
    what: str
    """"began", "ended", or the name of a step."""
    job: str
    kind: str
    guest: str
    source: str | None
    target: str | None
    outcome: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One entry of the audit trail, as stored."""

    seq: int
    """1, 2, … without gaps."""
    fact: AuditFact
    previous: str
    digest: str


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


def digest(seq: int, fact: AuditFact, previous: str) -> str:
    """Return the SHA-256 digest of an entry, as hex digits."""
    fields = [
        seq,
        fact.at_ms,
        fact.user,
        fact.controller_host,
        fact.what,
        fact.job,
        fact.kind,
        fact.guest,
        fact.source,
        fact.target,
        fact.outcome,
        previous,
    ]
    # A JSON list separates the fields unambiguously, and null differs from an empty text.
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()


def following(last: AuditEntry | None, fact: AuditFact) -> AuditEntry:
    """Return the entry that appends `fact` after the last entry; None: the trail is empty."""
    seq, previous = (1, START) if last is None else (last.seq + 1, last.digest)
    return AuditEntry(seq=seq, fact=fact, previous=previous, digest=digest(seq, fact, previous))


def verify(entries: Iterable[AuditEntry], known_head: str | None = None) -> Verified:
    """Verify the chain, and find the first broken entry.

    `entries`: all entries, sorted by number. `known_head`: a head that was kept in another place.
    It may be older than the trail's head; if no entry has this digest, the end of the trail was
    removed or the trail was rewritten.
    """
    last: AuditEntry | None = None
    found = known_head in (None, START)
    for entry in entries:
        if (why := _fault(last, entry)) is not None:
            return _result(last, Broken(seq=entry.seq, why=why))
        last = entry
        found = found or entry.digest == known_head
    if found:
        return _result(last, None)
    seq = 1 if last is None else last.seq + 1
    why = "no entry has the known head: the end was removed, or the trail was rewritten"
    return _result(last, Broken(seq=seq, why=why))


def _fault(last: AuditEntry | None, entry: AuditEntry) -> str | None:
    expected, previous = (1, START) if last is None else (last.seq + 1, last.digest)
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


def _result(last: AuditEntry | None, broken: Broken | None) -> Verified:
    if last is None:
        return Verified(entries=0, head=START, broken=broken)
    return Verified(entries=last.seq, head=last.digest, broken=broken)
