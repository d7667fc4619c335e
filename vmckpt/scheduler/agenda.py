"""Decide which scheduled work is due now, and when to check again. Pure.

The input is everything known: the contents of the stores, what this service has done, and what has
failed. No state is kept here, so a service that was killed resumes where it left off.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo

from vmckpt.errors import GuestLocked, VmckptError
from vmckpt.model.guest import GuestState
from vmckpt.policy import calendar
from vmckpt.policy.calendar import When
from vmckpt.policy.model import Check, Keep, Schedule
from vmckpt.scheduler.jobs import (
    CollectGarbage,
    CopySnapshot,
    CreateGroup,
    CreateSnapshot,
    PruneSnapshots,
    VerifySnapshots,
    Work,
)
from vmckpt.snapshot import retention
from vmckpt.snapshot.retention import Kept
from vmckpt.units import Seconds, show_count

COLLECT = Seconds(6 * 3600.0)
"""Interval, in seconds, between two garbage collections of a store."""
_FIRST, _LONGEST = Seconds(30.0), Seconds(3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPlace:
    """A guest and its host."""

    uuid: str
    name: str
    host: str
    state: GuestState
    seen: bool = True
    """Whether the host answers."""

    @property
    def active(self) -> bool:
        """Whether the guest is active; see `GuestState.is_active`."""
        return self.state.is_active


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One schedule for one guest."""

    place: GuestPlace
    policy: str
    schedule: Schedule
    store: str
    """Name of the store into which the snapshots are taken."""
    when: When
    """When snapshots are due; for `every: auto`, the interval computed for the guest."""
    reckoned: str | None = None
    """How the interval was computed; None unless the schedule has `every: auto`."""

    @property
    def key(self) -> tuple[str, str]:
        """The key of the order's snapshots: the guest's UUID and the schedule's name."""
        return self.place.uuid, self.schedule.name

    @property
    def stores(self) -> tuple[tuple[str, Keep], ...]:
        """All stores that the schedule uses, each with its retention rules."""
        copies = ((one.store, one.keep) for one in self.schedule.copies)
        return ((self.store, self.schedule.keep), *copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A snapshot in a store, signed by a trusted writer."""

    kept: Kept
    looked_at: Mapping[str, float] = field(default_factory=dict)
    """When the snapshot was last verified, by depth."""

    @property
    def key(self) -> tuple[str, str | None]:
        """See Order.key."""
        return self.kept.guest, self.kept.schedule


Shelf = Mapping[str, Held]
"""The snapshots in a store, by ID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The record of work that failed and will be retried."""

    times: int
    """Number of consecutive failures."""
    until: float
    """Earliest time of the next attempt, in seconds since 1970."""
    why: str
    recover: bool = False
    """Whether an interrupted job must be recovered first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything known at one instant."""

    now: float
    zone: tzinfo
    orders: Sequence[Order]
    shelves: Mapping[str, Shelf | None]
    """The snapshots in each store, by the store's name; None if the store cannot be read."""
    taken: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """When this service last took a snapshot for each order, by Order.key. Times are from the
    service's own clock: the clock of a host may differ."""
    proved: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """When this service last verified each snapshot, by store and ID. Used if the result could not
    be recorded in the store."""
    opens: bool = True
    """Whether the service has a key to decrypt snapshots; if not, it verifies only sealed data."""
    collected: Mapping[str, float] = field(default_factory=dict)
    busy: frozenset[str] = frozenset()
    """Lanes in which work is in progress."""
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """The record of failed work, by the key of the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The state of one order, for display."""

    order: Order
    last: float | None
    """When the last snapshot was taken; None if no snapshot is known."""
    due: float | None
    """When the next snapshot is due; a time up to `Scene.now` means now. None: unknown."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """The work to start now, at most one piece per lane, and the latest time of the next check."""

    rows: tuple[Row, ...]
    work: tuple[Work, ...]
    next: float | None


def troubled(before: Trouble | None, now: float, why: str, *, recover: bool = False) -> Trouble:
    """Return the record after one more failure; the wait doubles each time, up to a limit.

    `why`: the error; `recover`: see Trouble.
    """
    times = 1 if before is None else before.times + 1
    wait = min(_FIRST * 2 ** min(times - 1, 16), _LONGEST)
    return Trouble(times=times, until=now + wait, why=why, recover=recover)


def needs_recovery(error: Exception) -> bool:
    """Return whether an interrupted job must be recovered before the work can succeed.

    The job may be the failed work itself, if it could not undo all its changes.
    """
    if not isinstance(error, VmckptError):
        return False
    return not error.undone or (isinstance(error, GuestLocked) and error.interrupted)


def agenda(scene: Scene) -> Agenda:
    """Decide which work to start now."""
    away = _out_of_sight(scene.orders)
    rows = tuple(_row(order, scene, away) for order in scene.orders)
    checks = list(_verifies(scene))
    # The result of a verification may change which snapshots are kept.
    unsure = {one.store for one in checks if _waits(one.key, scene) is None}
    wanted = [
        *_takes(scene, rows),
        *(one for order in scene.orders for one in _copies(order, scene)),
        *checks,
        *(
            one for order in scene.orders for one in _prunes(order, scene)
            if one.store not in unsure
        ),
        *_collects(scene),
    ]  # fmt: skip
    work: list[Work] = []
    lanes = set(scene.busy)
    later = [row.due for row in rows if row.due is not None and row.due > scene.now]
    for one in wanted:
        waits = _waits(one.key, scene)
        if waits is not None:
            later.append(waits)
        elif not lanes & (mine := one.lanes if isinstance(one, CreateGroup) else {one.lane}):
            lanes |= mine
            work.append(one)
    later += [at + COLLECT for at in scene.collected.values()]
    later = [at for at in later if at > scene.now]
    return Agenda(rows=rows, work=tuple(work), next=min(later, default=None))


def _waits(key: str, scene: Scene) -> float | None:
    """Return the earliest time at which failed work may be retried; None if it may start now.

    `key`: the work's key in `scene.troubles`.
    """
    trouble = scene.troubles.get(key)
    # A longer wait than the maximum means that the clock was set back.
    if trouble is None or not 0 < trouble.until - scene.now <= _LONGEST:
        return None
    return trouble.until


# Taking


def _row(order: Order, scene: Scene, unseen: Mapping[tuple[str, str], GuestPlace]) -> Row:
    """Return the row for an order. `unseen`: the result of _out_of_sight."""
    last = _last(order, scene)
    shelf = scene.shelves.get(order.store)
    away = None if order.place.seen else order.place
    if away is None and order.schedule.group:
        away = unseen.get((order.policy, order.schedule.name))
    if away is not None:
        which = "" if away is order.place else f"waiting for {away.name}: "
        return Row(order=order, last=last, due=None, why=f"{which}{away.host} does not answer")
    if not order.place.active:
        state = order.place.state.in_words
        return Row(order=order, last=last, due=None, why=f"the guest is {state}")
    if shelf is None:
        return Row(order=order, last=last, due=None, why=f"store {order.store} cannot be read")
    due = calendar.due(order.when, last, scene.now, scene.zone)
    key = CreateSnapshot.key_of(order.place.uuid, order.schedule.name)
    if order.schedule.group:
        key = f"take group {order.policy}/{order.schedule.name}"
    trouble, waits = scene.troubles.get(key), _waits(key, scene)
    if not due.now:
        return Row(order=order, last=last, due=due.next, why=order.schedule.text)
    if trouble is not None and waits is not None:
        why = f"failed {show_count(trouble.times, 'time')}; will be retried"
        return Row(order=order, last=last, due=waits, why=why)
    why = "no snapshot yet" if last is None else order.schedule.text
    return Row(order=order, last=last, due=scene.now, why=why)


def _out_of_sight(orders: Sequence[Order]) -> Mapping[tuple[str, str], GuestPlace]:
    """Return, for each delayed group, a member whose host does not answer.

    The keys are the policy and the schedule of the group.
    """
    return {
        (one.policy, one.schedule.name): one.place
        for one in orders if one.schedule.group and not one.place.seen
    }  # fmt: skip


def _last(order: Order, scene: Scene) -> float | None:
    """Return the time of the order's last snapshot; None if no snapshot is known.

    Damaged snapshots and snapshots dated in the future do not count.
    """
    own = scene.taken.get(order.key)
    if own is not None and own <= scene.now:
        return own
    found = (
        held.kept.made_at
        for shelf in _shelves(order, scene)
        for held in shelf.values()
        if held.key == order.key and held.kept.good is not False
    )
    return max((at for at in found if at <= scene.now), default=None)


def _shelves(order: Order, scene: Scene) -> Iterator[Shelf]:
    for name, _ in order.stores:
        shelf = scene.shelves.get(name)
        if shelf is not None:
            yield shelf


def _takes(scene: Scene, rows: Sequence[Row]) -> Iterator[Work]:
    due = [row for row in rows if row.due is not None and row.due <= scene.now]
    # The guest that has waited longest goes first, because a host takes one snapshot at a time.
    for row in sorted(due, key=lambda one: one.last or 0.0):
        if not row.order.schedule.group:
            yield _take(row.order)
    groups = dict.fromkeys(
        (row.order.policy, row.order.schedule.name) for row in due if row.order.schedule.group
    )
    for policy, name in groups:
        members = [
            row.order for row in rows
            if (row.order.policy, row.order.schedule.name) == (policy, name)
        ]  # fmt: skip
        # A guest that is shut off exchanges no data with the other members, so it is left out.
        running = [one.place for one in members if one.place.active]
        if len(running) == 1:
            one = next(one for one in members if one.place is running[0])
            yield _take(one)
        else:
            yield CreateGroup(
                guests=tuple((one.uuid, one.name, one.host) for one in running),
                store=members[0].store, policy=policy, schedule=name,
            )  # fmt: skip


def _take(order: Order) -> CreateSnapshot:
    place, schedule = order.place, order.schedule
    return CreateSnapshot(
        guest=place.uuid, name=place.name, host=place.host, store=order.store, policy=order.policy,
        schedule=schedule.name, memory=schedule.memory,
    )  # fmt: skip


# Copying and pruning


def _missing(order: Order, target: str, keep: Keep, scene: Scene) -> list[str] | None:
    """Return the IDs of the snapshots to be copied to `target`, oldest first; None if unknown."""
    near, far = scene.shelves.get(order.store), scene.shelves.get(target)
    if near is None or far is None:
        return None
    # A snapshot's pin and verification results in one store do not apply to its copy in another.
    both = {**{id_: _as_copied(held) for id_, held in near.items()}, **far}
    verdicts = _plan(order, both, keep, scene)
    wanted = [
        id_ for id_ in verdicts
        if id_ not in far and both[id_].key == order.key and both[id_].kept.good is not False
    ]  # fmt: skip
    return sorted(wanted, key=lambda id_: both[id_].kept.made_at)


def _as_copied(held: Held) -> Held:
    good = None if held.kept.good else held.kept.good
    return replace(held, kept=replace(held.kept, pinned=False, good=good))


def _plan(order: Order, shelf: Shelf, keep: Keep, scene: Scene) -> set[str]:
    """Return the IDs of the snapshots to keep: of the guest, and of other guests in its groups."""
    mine = [held.kept for held in shelf.values() if held.kept.guest == order.place.uuid]
    cuts = {one.group for one in mine if one.group is not None}
    # If a group's snapshot of another guest is kept, its snapshot of this guest is kept as well.
    beside = [
        held.kept for held in shelf.values()
        if held.kept.group in cuts and held.kept.guest != order.place.uuid
    ] if cuts else []  # fmt: skip
    verdicts = retention.plan(
        [*mine, *beside], keep, schedule=order.schedule.name, now=scene.now, zone=scene.zone
    )
    return {one.id for one in verdicts if one.stays}


def _copies(order: Order, scene: Scene) -> Iterator[Work]:
    for copy in order.schedule.copies:
        for id_ in _missing(order, copy.store, copy.keep, scene) or ():
            yield CopySnapshot(id=id_, name=order.place.name, source=order.store, target=copy.store)


def _prunes(order: Order, scene: Scene) -> Iterator[PruneSnapshots]:
    for name, keep in order.stores:
        shelf = scene.shelves.get(name)
        if shelf is None or keep.nothing_said:
            continue
        stays = _plan(order, shelf, keep, scene)
        if name == order.store:
            waiting = _not_copied(order, shelf, scene)
            if waiting is None:
                continue
            stays |= waiting
        goes = [id_ for id_, held in shelf.items() if held.key == order.key and id_ not in stays]
        if goes:
            goes.sort(key=lambda id_: shelf[id_].kept.made_at)
            yield PruneSnapshots(
                store=name, ids=tuple(goes), schedule=order.schedule.name, name=order.place.name
            )


def _not_copied(order: Order, shelf: Shelf, scene: Scene) -> set[str] | None:
    """Return the IDs of the snapshots that must stay until they are copied; None if unknown."""
    found: set[str] = set()
    for copy in order.schedule.copies:
        missing = _missing(order, copy.store, copy.keep, scene)
        if missing is None:
            return None
        found |= set(missing) & set(shelf)
    return found


# Verifying and collecting


def _verifies(scene: Scene) -> Iterator[VerifySnapshots]:
    due: dict[tuple[str, Check], dict[str, None]] = {}
    for order in scene.orders:
        proof = order.schedule.verify
        if proof is None:
            continue
        for name, _ in order.stores:
            mine = {
                id_: held for id_, held in (scene.shelves.get(name) or {}).items()
                if held.key == order.key
            }  # fmt: skip
            depths = {proof.depth} if scene.opens else {proof.depth, Check.SEALED}
            looked = {
                id_: max(_past(scene.proved.get((name, id_)), scene),
                         *(_past(held.looked_at.get(str(one)), scene) for one in depths))
                for id_, held in mine.items()
            }  # fmt: skip
            # A manual verification of one snapshot does not count for the others.
            last = min(
                (max(at, _past(mine[id_].kept.made_at, scene)) for id_, at in looked.items()),
                default=scene.now,
            )
            if mine and (not any(looked.values()) or scene.now - last >= proof.every):
                due.setdefault((name, proof.depth), {}).update(dict.fromkeys(mine))
    for (name, depth), ids in due.items():
        yield VerifySnapshots(store=name, ids=tuple(ids), depth=depth)


def _past(at: float | None, scene: Scene) -> float:
    """Return `at`; 0 if `at` is None, or in the future because a clock was set back."""
    return 0.0 if at is None or at > scene.now else at


def _collects(scene: Scene) -> Iterator[Work]:
    for name, shelf in scene.shelves.items():
        at = scene.collected.get(name)
        if shelf is not None and (at is None or not 0 <= scene.now - at < COLLECT):
            yield CollectGarbage(store=name)
