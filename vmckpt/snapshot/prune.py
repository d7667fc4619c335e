"""Delete snapshots that a schedule's retention rules do not keep.

Only snapshots made by that schedule are deleted.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from typing import Any

from vmckpt.errors import BadInput, NotInStore
from vmckpt.policy.model import Keep
from vmckpt.snapshot import retention
from vmckpt.snapshot.retention import Kept
from vmckpt.snapshot.verify import results
from vmckpt.store import snapshot_list
from vmckpt.store.format.metadata import Public
from vmckpt.store.repository import Store, bare


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneDecision:
    """Whether a snapshot is kept, and why."""

    id: str
    public: Public | None
    """The snapshot's public metadata; None if the snapshot cannot be read."""
    stays: bool
    reasons: tuple[str, ...]
    deleted: bool = False

    def as_json(self) -> dict[str, Any]:
        told = self.public
        return {
            "id": self.id,
            "name": None if told is None else told.name,
            "guest": None if told is None else told.guest,
            "made_at": None if told is None else told.made_at,
            "stays": self.stays,
            "reasons": list(self.reasons),
            "deleted": self.deleted,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The snapshots of a store, as seen by pruning."""

    known: Mapping[str, Public]
    """Snapshots signed by a trusted writer. Other snapshots do not count and are not deleted."""
    left: Mapping[str, tuple[Public | None, str]]
    """The other snapshots, and why they are kept."""
    pins: frozenset[str]
    good: Mapping[str, bool | None] = field(default_factory=dict)
    """Whether each snapshot passed its last check, by ID; None or missing: unknown."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that made these snapshots."""
        return tuple(sorted({one.schedule for one in self.known.values() if one.schedule}))


def survey(store: Store, trusted: Collection[bytes]) -> Survey:
    """Read all snapshots of a store.

    `trusted`: public keys of trusted writers. Raises StoreError.
    """
    known: dict[str, Public] = {}
    left: dict[str, tuple[Public | None, str]] = {}
    pins = store.pins()
    for id_, told in snapshot_list.proved(store).items():
        if not isinstance(told, Public):
            left[id_] = (None, f"cannot be read: {bare(told, store, f'snapshots/{id_}')}")
        # Only trusted writers count. Otherwise an attacker with write access to the store could
        # displace good snapshots with newer snapshots.
        elif bytes.fromhex(told.signer) in trusted:
            known[id_] = told
        else:
            left[id_] = (told, "its writer is not trusted")
    good = {id_: one.good for id_, one in results.verdicts(store, trusted).items()}
    return Survey(known=known, left=left, pins=pins, good=good)


def schedule_of(found: Survey, asked: str | None, where: str) -> str:
    """Return the schedule to prune: `asked`, or else the only schedule in the store.

    `where` is the store's name for messages. Raises BadInput if there is no schedule, or more than
    one.
    """
    if asked is not None:
        return asked
    if not found.schedules:
        raise BadInput(
            f"{where} has no snapshot that was made by a schedule and signed by a trusted writer",
            hint="only such snapshots are pruned; delete others with vmckpt snapshot delete"
            " SNAPSHOT",
        )
    if len(found.schedules) > 1:
        raise BadInput(
            f"{where} has snapshots of several schedules: {', '.join(found.schedules)}",
            hint="choose one with --schedule",
        )
    return found.schedules[0]


def plan(
    found: Survey, keep: Keep, *, schedule: str, now: float, zone: tzinfo
) -> tuple[PruneDecision, ...]:
    """Decide which snapshots are kept. Pure. Raises BadInput if there are no rules.

    Returns the decisions, newest first. `now` and `zone` are as in `retention.plan`.
    """
    if keep.nothing_said:
        raise BadInput(
            "no retention rule was given, so all snapshots would be kept",
            hint="give a rule, for example --keep-last 7",
        )
    kept = [
        Kept(
            id=id_,
            guest=one.guest_uuid,
            made_at=one.made_at,
            schedule=one.schedule,
            pinned=id_ in found.pins,
            good=found.good.get(id_),
            group=one.group,
        )
        for id_, one in found.known.items()
    ]
    verdicts = retention.plan(kept, keep, schedule=schedule, now=now, zone=zone)
    judged = [
        PruneDecision(id=one.id, public=found.known[one.id], stays=one.stays, reasons=one.reasons)
        for one in verdicts
    ]
    left = [
        PruneDecision(id=id_, public=public, stays=True, reasons=(why,))
        for id_, (public, why) in sorted(found.left.items())
    ]
    return (*judged, *left)


def carry_out(store: Store, fates: Collection[PruneDecision]) -> Iterator[PruneDecision]:
    """Delete snapshots that are not kept, oldest first. Yields each result. Raises StoreError."""
    for one in reversed([one for one in fates if not one.stays]):
        try:
            store.delete(one.id)
        except BadInput:
            yield replace(one, stays=True, reasons=("pinned meanwhile",))
        except NotInStore:
            yield replace(one, reasons=("already deleted by another process",))
        else:
            yield replace(one, deleted=True)
