"""Deletes what a schedule's retention does not keep. Only what the schedule made itself can go."""

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
    """What becomes of a snapshot, and why."""

    id: str
    public: Public | None
    """None: it cannot be read."""
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
    """The snapshots of a store, as pruning sees them."""

    known: Mapping[str, Public]
    """Those that a trusted writer signed: no others count, nor go."""
    left: Mapping[str, tuple[Public | None, str]]
    """The others, and why they are left alone."""
    pins: frozenset[str]
    good: Mapping[str, bool | None] = field(default_factory=dict)
    """What checks found, of those that were checked."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that made any."""
        return tuple(sorted({one.schedule for one in self.known.values() if one.schedule}))


def survey(store: Store, trusted: Collection[bytes]) -> Survey:
    """Look at all snapshots. Raises StoreError."""
    known: dict[str, Public] = {}
    left: dict[str, tuple[Public | None, str]] = {}
    pins = store.pins()
    for id_, told in snapshot_list.proved(store).items():
        if not isinstance(told, Public):
            left[id_] = (None, f"cannot be read: {bare(told, store, f'snapshots/{id_}')}")
        # Whoever may write into the store could else make good ones go by newer ones of their own.
        elif bytes.fromhex(told.signer) in trusted:
            known[id_] = told
        else:
            left[id_] = (told, "its writer is not trusted here")
    good = {id_: one.good for id_, one in results.verdicts(store, trusted).items()}
    return Survey(known=known, left=left, pins=pins, good=good)


def schedule_of(found: Survey, asked: str | None, where: str) -> str:
    """Which schedule is meant. Raises BadInput if none is named and there is not just one."""
    if asked is not None:
        return asked
    if not found.schedules:
        raise BadInput(
            f"no snapshot in {where} that a trusted writer signed was made by a schedule",
            hint="only those are pruned; vmckpt snapshot delete is for others",
        )
    if len(found.schedules) > 1:
        raise BadInput(
            f"{where} has snapshots of schedules {', '.join(found.schedules)}",
            hint="name one with --schedule",
        )
    return found.schedules[0]


def plan(
    found: Survey, keep: Keep, *, schedule: str, now: float, zone: tzinfo
) -> tuple[PruneDecision, ...]:
    """What becomes of each, the newest first. Pure. Raises BadInput without any rule."""
    if keep.nothing_said:
        raise BadInput(
            "no rule says what to keep, so all would stay", hint="say one, like --keep-last 7"
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
    """Delete what goes, the oldest first; tells of each. Raises StoreError."""
    for one in reversed([one for one in fates if not one.stays]):
        try:
            store.delete(one.id)
        except BadInput:
            yield replace(one, stays=True, reasons=("pinned meanwhile",))
        except NotInStore:
            yield replace(one, reasons=("somebody else has deleted it",))
        else:
            yield replace(one, deleted=True)
