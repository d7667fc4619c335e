"""The results of a snapshot's checks, stored beside it in `verified/<id>` (docs/formats.md).

Each check is signed by its writer and bound to its store, because these objects are writable by
every client of the store. Checks without a trusted signature are ignored. Removing checks, or
replacing them with older checks, makes a snapshot's state unknown or outdated, but never better
than a check has found it.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from vmckpt.errors import NotInStore, StoreDamaged
from vmckpt.snapshot.verify.verify import Depth, Proved
from vmckpt.store.backend.base import Backend
from vmckpt.store.format import manifest
from vmckpt.store.format.manifest import Signer
from vmckpt.store.repository import Store

PREFIX = "verified/"
VERSION = 1
BOOT = "boot"
"""Depth of a boot test: the snapshot was restored and ran."""
_RANKS = {str(Depth.SEALED): 0, str(Depth.OPENED): 1, str(Depth.DEEP): 2, BOOT: 3}
_MARK = b"vmckpt verified 1\n"
_MOST = 32
"""The largest number of checks in one object."""
_LONGEST = 200
_LARGEST = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of one check."""

    depth: str
    at: float
    good: bool
    what: str
    """What was wrong; empty if nothing was wrong."""
    by: str
    """The user and host that ran the check, such as "root@controller"."""
    signer: str
    """The writer's public key, in hex."""

    def as_json(self) -> dict[str, Any]:
        return {
            "depth": self.depth, "at": self.at, "good": self.good, "what": self.what,
            "by": self.by, "signer": self.signer,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{'good' if self.good else 'bad'} ({self.depth})"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySummary:
    """The combined result of all checks of a snapshot."""

    good: bool | None
    """Whether the snapshot is intact; None if unknown."""
    last: Checked | None
    """The check that determined `good`; None if `good` is unknown."""
    looked_at: Mapping[str, float]
    """Time of the last check of at least the given depth, by depth."""

    def as_json(self) -> dict[str, Any] | None:
        if self.last is None:
            return None
        told = self.last.as_json()
        return {key: told[key] for key in ("depth", "at", "good", "what", "by")}


UNKNOWN = VerifySummary(good=None, last=None, looked_at={})


def verdict(checks: Iterable[Checked]) -> VerifySummary:
    """Combine the checks of a snapshot. Pure.

    A snapshot counts as damaged until a later check, at least as deep, finds no damage.
    """
    known = sorted(checks, key=lambda one: one.at)
    if not known:
        return UNKNOWN
    looked = {
        depth: max(one.at for one in known if _RANKS[one.depth] >= rank)
        for depth, rank in _RANKS.items()
        if any(_RANKS[one.depth] >= rank for one in known)
    }
    bad = [
        one
        for at, one in enumerate(known)
        if not one.good
        and not any(
            later.good and _RANKS[later.depth] >= _RANKS[one.depth] for later in known[at + 1 :]
        )
    ]
    last = bad[-1] if bad else next(one for one in reversed(known) if one.good)
    return VerifySummary(good=not bad, last=last, looked_at=looked)


def load(store: Store, id_: str, trusted: Collection[bytes]) -> tuple[Checked, ...]:
    """Return the valid checks of a snapshot by trusted writers. Raises StoreError."""
    key = PREFIX + id_
    try:
        raw = store.backend.get(key, 0, _LARGEST + 1)
        values = manifest.parsed(key, raw, store.backend.where)
    except (NotInStore, StoreDamaged):
        return ()
    rows = values.get("checks")
    if values.get("version") != VERSION or not isinstance(rows, list):
        return ()
    found = (_checked(store.id, id_, row, trusted) for row in rows[:_MOST])
    return tuple(one for one in found if one is not None)


def verdicts(store: Store, trusted: Collection[bytes]) -> dict[str, VerifySummary]:
    """Return the combined result of each snapshot that has checks, by ID. Raises StoreError."""
    ids = [one.key.removeprefix(PREFIX) for one in store.backend.keys(PREFIX)]
    return {id_: verdict(load(store, id_, trusted)) for id_ in ids}


def _checked(
    store: str, id_: str, row: object, trusted: Collection[bytes]
) -> Checked | None:  # fmt: skip
    """Parse a check. Returns None if it is invalid or has no trusted signature."""
    if not isinstance(row, dict):
        return None
    try:
        one = Checked(
            depth=str(row["depth"]), at=float(row["at"]), good=row["good"] is True,
            what=str(row["what"]), by=str(row["by"]), signer=str(row["signer"]),
        )  # fmt: skip
        key, signature = bytes.fromhex(one.signer), bytes.fromhex(str(row["signature"]))
        if one.depth not in _RANKS or key not in trusted or not math.isfinite(one.at):
            return None
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _message(store, id_, one))
    except (LookupError, ValueError, TypeError, OverflowError, InvalidSignature):
        return None
    return one


def _message(store: str, id_: str, one: Checked) -> bytes:
    told = {**one.as_json(), "store": store, "snapshot": id_}
    return _MARK + json.dumps(told, sort_keys=True, separators=(",", ":")).encode()


def record(store: Store, id_: str, one: Checked, keys: Signer) -> None:
    """Store the result of a check, replacing the same writer's previous result of the same depth.

    Raises StoreError.
    """
    one = replace(one, what=one.what[:_LONGEST], by=one.by[:_LONGEST], signer=keys.public.hex())
    key = PREFIX + id_
    rows = [
        row for row in _rows(store.backend, key)
        if (row.get("depth"), row.get("signer")) != (one.depth, one.signer)
    ]  # fmt: skip
    row = {**one.as_json(), "signature": keys.sign(_message(store.id, id_, one)).hex()}
    values = {"version": VERSION, "snapshot": id_, "checks": [row, *rows[: _MOST - 1]]}
    store.backend.put(key, manifest.written(key, values), replace=True)


def _rows(backend: Backend, key: str) -> list[dict[str, Any]]:
    """Return the stored checks without verifying them."""
    try:
        values = manifest.parsed(key, backend.get(key, 0, _LARGEST + 1), backend.where)
    except (NotInStore, StoreDamaged):
        return []
    rows = values.get("checks")
    known = values.get("version") == VERSION and isinstance(rows, list)
    return [row for row in rows if isinstance(row, dict)] if known and rows else []


def findings(proved: Proved, *, by: str, at: float) -> dict[str, Checked]:
    """Return the result of a verification for each snapshot, by ID. Pure.

    Snapshots with an unknown result (untrusted writer, newer version, unreadable object) are
    omitted. `by` is the user and host, `at` the time in seconds since 1970.
    """
    unclear = {id_ for one in proved.flaws if one.kind is not StoreDamaged for id_ in one.snapshots}
    found = {}
    for id_ in proved.ids:
        wrong = [str(one) for one in proved.flaws if id_ in one.snapshots]
        depth = Depth.SEALED if id_ in proved.closed else proved.depth
        if id_ not in unclear:
            found[id_] = Checked(
                depth=str(depth), at=at, good=not wrong, what="; ".join(wrong), by=by, signer=""
            )
    return found


def write_down(store: Store, proved: Proved, keys: Signer, *, by: str, at: float) -> None:
    """Store the results of a verification; arguments as in `findings`. Raises StoreError."""
    there = {one.id for one in store.manifests()}
    for id_, one in findings(proved, by=by, at=at).items():
        if id_ in there:  # the results of a deleted snapshot would never be removed
            record(store, id_, one, keys)
