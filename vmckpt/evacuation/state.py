"""The state of a run: the result of each move, which guests are retried, and where. Pure.

A failed move does not affect other guests. A failed move is retried a few times, to another host if
the target was at fault. A host to which several moves in a row fail is excluded for a while, and
then tried with one guest.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from vmckpt.evacuation import bandwidth, schedule
from vmckpt.evacuation.bandwidth import Move, Under
from vmckpt.evacuation.plan import placement
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.schedule import Windows
from vmckpt.model.migration import FailureSide
from vmckpt.units import BytesPerSecond, Seconds, show_count

_ELSEWHERE = 0.1
"""Fraction of the usual wait after which another host is tried; not zero, since the network may be
the cause of the failure."""
_MORE = 1.1
"""A stream's bandwidth replaces the known bandwidth if it is higher by more than this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How often and when a move is retried, and when a host is excluded."""

    tries: int = 3
    """Number of attempts for each guest, including the first."""
    first_wait: Seconds = Seconds(10.0)
    """Wait after a guest's first failure; doubled after each further failure."""
    trips: int = 2
    """Number of consecutive failures after which a host is excluded."""
    left_out: Seconds = Seconds(60.0)
    """How long a host is excluded; doubled each time."""
    most_outs: int = 4
    """Number of times that a host is excluded before it is excluded permanently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvacuationTerms:
    """The limits of a run."""

    rules: Rules = field(default_factory=Rules)
    windows: Windows = field(default_factory=Windows)
    patience: RetryLimits = field(default_factory=RetryLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failed attempt to move a guest; the guest is still on its source."""

    target: str
    at: float
    why: str
    blame: FailureSide


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The recent history of a host as a target."""

    failures: int = 0
    """Number of consecutive failures."""
    out_until: float = 0.0
    outs: int = 0
    """Number of times that the host was excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run."""

    waiting: tuple[Move, ...] = ()
    running: tuple[Under, ...] = ()
    done: tuple[Move, ...] = ()
    left: tuple[Unplaced, ...] = ()
    hoping: tuple[Unplaced, ...] = ()
    """Guests without a target for now. Such a guest may get a target when a running move ends, or
    when an excluded host may be tried again."""
    failed: Mapping[str, tuple[Failed, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Failed attempts, by guest."""
    records: Mapping[str, Record] = field(default_factory=lambda: MappingProxyType({}))
    """Histories of hosts as targets, by host."""
    carried: Mapping[str, BytesPerSecond] = field(default_factory=lambda: MappingProxyType({}))
    """Highest bandwidth of a stream that had its links to itself, by source."""
    paused: bool = False

    @property
    def over(self) -> bool:
        """Whether no move is running and no guest is waiting."""
        return not self.waiting and not self.running and not self.hoping


def begins(course: RunState, moves: Iterable[Move]) -> RunState:
    """Return the state after these moves have begun."""
    begun = tuple(moves)
    names = {one.name for one in begun}
    return replace(
        course, waiting=tuple(one for one in course.waiting if one.name not in names),
        running=_beside((*course.running, *(bandwidth.begin(one) for one in begun))),
    )  # fmt: skip


def _beside(running: Sequence[Under]) -> tuple[Under, ...]:
    """Return the moves, with each move that shares a link marked as shared."""
    busy = [one for one in running if not one.ending]
    sources = Counter(one.move.source for one in busy)
    targets = Counter(one.move.target for one in busy)
    return tuple(
        replace(one, shared=True)
        if not one.ending and (sources[one.move.source] > 1 or targets[one.move.target] > 1)
        else one
        for one in running
    )


def nearing(course: RunState, guests: Container[str]) -> RunState:
    """Return the state in which exactly the moves of `guests` are marked as ending, so that other
    moves may use their links.

    The mark is removed again from a move that does not converge.
    """
    if all(one.ending is (one.move.name in guests) for one in course.running):
        return course
    return replace(
        course,
        running=tuple(
            replace(one, setup=Seconds(0.0), ending=True) if one.move.name in guests
            else replace(one, ending=False)
            for one in course.running
        ),
    )  # fmt: skip


def succeeded(course: RunState, guest: str) -> RunState:
    """Return the state after a move has succeeded."""
    under = _under(course, guest)
    records = {**course.records, under.move.target: Record()}
    return replace(
        course, running=_without(course, guest), done=(*course.done, under.move),
        records=MappingProxyType(records),
    )  # fmt: skip


def carrying(course: RunState, streams: Mapping[str, BytesPerSecond]) -> RunState:
    """Return the state with measured bandwidths. `streams`: bandwidth by guest.

    The bandwidth of a stream that has its links to itself is also expected of other streams from
    the same source.
    """
    known = dict(course.carried)
    for one in course.running:
        seen = streams.get(one.move.name, 0)
        if not one.shared and seen > _MORE * known.get(one.move.source, 0):
            known[one.move.source] = BytesPerSecond(seen)
    if known == course.carried:
        return course
    after = replace(course, carried=MappingProxyType(known))
    return replace(
        after, waiting=tuple(_as_carried(after, one) for one in after.waiting),
        running=tuple(replace(one, move=_as_carried(after, one.move)) for one in after.running),
    )  # fmt: skip


def _as_carried(course: RunState, move: Move) -> Move:
    """Return the move with the measured bandwidth of its source, which is preferred to the
    forecast."""
    most = course.carried.get(move.source)
    return move if most is None else replace(move, tenant=replace(move.tenant, most=most))


def failed(course: RunState, guest: str, failure: Failed, patience: RetryLimits) -> RunState:
    """Return the state after the move of `guest` has failed.

    The guest waits for another attempt, or is given up.
    """
    move = _under(course, guest).move
    tries = (*course.failed.get(guest, ()), failure)
    known = MappingProxyType({**course.failed, guest: tries})
    records = course.records
    if failure.blame is FailureSide.TARGET:
        told = _blamed(records.get(move.target, Record()), failure.at, patience)
        records = MappingProxyType({**records, move.target: told})
    after = replace(course, running=_without(course, guest), failed=known, records=records)
    if len(tries) >= patience.tries:
        count = show_count(len(tries), "time")
        why = f"tried {count}, most recently to {failure.target}: {failure.why}"
        hint = f"see vmckpt jobs --all --guest {guest}; the guest is still on its source host"
        return replace(after, left=(*after.left, Unplaced(tenant=move.tenant, why=why, hint=hint)))
    return replace(after, waiting=(*after.waiting, move))


def given_up(course: RunState, guest: str, why: str, hint: str) -> RunState:
    """Return the state after a failed move that is not to be retried.

    `guest`: its name; `why`, `hint`: the reason and what to do, for the report.
    """
    left = Unplaced(tenant=_under(course, guest).move.tenant, why=why, hint=hint)
    return replace(course, running=_without(course, guest), left=(*course.left, left))


def stuck(course: RunState, move: Move) -> RunState:
    """Return the state after giving up a guest whose move cannot begin."""
    waiting = tuple(one for one in course.waiting if one != move)
    left = Unplaced(
        tenant=move.tenant,
        why=f"the move to {move.target} cannot begin, and no other guest is moving",
        hint="free up memory on that host, or add a host",
    )  # fmt: skip
    return replace(course, waiting=waiting, left=(*course.left, left))


def _blamed(record: Record, at: float, patience: RetryLimits) -> Record:
    failures = record.failures + 1
    if failures < patience.trips and not record.outs:
        return replace(record, failures=failures)
    # A host that was excluded before is excluded again after one failure.
    until = at + patience.left_out * 2**record.outs
    if record.outs >= patience.most_outs:
        until = math.inf
    return Record(failures=failures, outs=record.outs + 1, out_until=until)


def _under(course: RunState, guest: str) -> Under:
    return next(one for one in course.running if one.move.name == guest)


def _without(course: RunState, guest: str) -> tuple[Under, ...]:
    return tuple(one for one in course.running if one.move.name != guest)


def closed(course: RunState, fleet: Fleet, now: float) -> Fleet:
    """Return the fleet with all hosts closed that are excluded at `now`, on the run's clock."""
    under = {one.move.target for one in course.running}
    places = tuple(
        one if one.closed is not None
        else replace(one, closed=_out(course.records.get(one.name), now, busy=one.name in under))
        for one in fleet.places
    )  # fmt: skip
    return replace(fleet, places=places)


def _out(record: Record | None, now: float, *, busy: bool) -> str | None:
    """Return why a host may not receive a guest now; None if it may.

    `busy`: whether a move to the host is running.
    """
    if record is None or not record.outs:
        return None
    if math.isinf(record.out_until):
        return f"{show_count(record.failures, 'move')} to this host failed in a row"
    if now < record.out_until:
        return (
            f"{show_count(record.failures, 'move')} to this host failed; excluded for"
            f" another {record.out_until - now:.0f} s"
        )
    return "is being tried with one guest" if busy else None


def planned(
    course: RunState, fleet: Fleet, rules: Rules, now: float, *, asked: frozenset[str]
) -> RunState:
    """Return the state with new targets for all waiting guests. `asked`: the guests that are to
    leave."""
    usable = closed(course, fleet, now)
    under = [one.move for one in course.running]
    busy = {one.name for one in under}
    # Running moves already use memory on their targets.
    coming = tuple(
        replace(one.tenant, name=f"{one.name} on its way", host=one.target, stays="is being moved")
        for one in under
    )  # fmt: skip
    over = {one.tenant.name for one in course.left}
    leaving = [
        one for one in fleet.tenants
        if one.name in asked and one.name not in busy and one.name not in over
    ]  # fmt: skip
    # A guest that was given up does not move to make room for others either.
    own = {
        one.name: replace(one, stays=one.stays or "its move was given up")
        if one.name in over else one
        for one in fleet.tenants
    }  # fmt: skip
    found = _placed(course, replace(usable, tenants=(*own.values(), *coming)), leaving, rules)
    moves = tuple(
        _as_carried(
            course,
            Move(tenant=own[one.tenant.name], source=one.tenant.host, target=one.target),
        )
        for one in found.going if one.tenant.name not in busy
    )  # fmt: skip
    if course.running or moves or _comes_back(course, now) is not None:
        return replace(course, waiting=moves, hoping=found.left)
    return replace(course, waiting=moves, left=(*course.left, *found.left), hoping=())


def _placed(
    course: RunState, fleet: Fleet, leaving: Sequence[Tenant], rules: Rules
) -> placement.Placement:
    """Place the leaving guests, avoiding targets to which their moves have failed.

    After a single failure, a guest may get such a target again if other guests would otherwise have
    to make room for it.
    """
    failed_ = {one.name: course.failed.get(one.name, ()) for one in leaving}
    apart = [_elsewhere(one, failed_[one.name], fleet) for one in leaving]
    found = placement.place(fleet, apart, rules)
    often = any(len(failures) > 1 for failures in failed_.values())
    if often or not any(one.displaced for one in found.going) or apart == leaving:
        return found
    again_ = placement.place(fleet, leaving, rules)
    return min(found, again_, key=_upset)


def _upset(one: placement.Placement) -> tuple[int, int]:
    return len(one.left), sum(going.displaced for going in one.going)


def _elsewhere(tenant: Tenant, failures: Sequence[Failed], fleet: Fleet) -> Tenant:
    """Return the guest, restricted to hosts to which its moves have not failed, if any exist."""
    bad = {
        (one.target, "a move there failed") for one in failures if one.blame is FailureSide.TARGET
    }
    if not bad:
        return tenant
    needs = replace(tenant.needs, never=tenant.needs.never | bad)
    capacity = CapacityModel(fleet.places, (), Rules())
    if not any(
        fits and place.closed is None and place.name != tenant.host
        for fits, place in zip(capacity.capable_hosts(needs).tolist(), fleet.places, strict=True)
    ):
        return tenant
    return replace(tenant, needs=needs)


def due(
    course: RunState, fleet: Fleet, terms: EvacuationTerms, now: float, *,
    changed: Container[str] | None = None,
) -> list[Move]:  # fmt: skip
    """Return the moves that begin now. `changed`: as in schedule.start."""
    if course.paused:
        return []
    capacity, links_ = _seated(course, fleet, terms, now), schedule.links_of(fleet)
    ready = _ready(course, fleet, terms, now)
    begun = schedule.start(capacity, ready, course.running, links_, terms.windows, changed=changed)
    if begun or course.running or len(ready) < len(course.waiting):
        return begun
    aside = schedule.detour(capacity, ready)
    return [] if aside is None else [aside]


def next_ones(course: RunState, fleet: Fleet, terms: EvacuationTerms, now: float) -> list[Move]:
    """Return the moves that may begin as soon as the links are free, in their order.

    Each target has room for each of its guests, but not necessarily for all of them.
    """
    capacity = _seated(course, fleet, terms, now)
    return [
        one for one in _ready(course, fleet, terms, now)
        if capacity.reasons_against(one.tenant, capacity.index[one.target]) is None
    ]  # fmt: skip


def _seated(course: RunState, fleet: Fleet, terms: EvacuationTerms, now: float) -> CapacityModel:
    """Return the capacity of all hosts, counting their guests and incoming moves."""
    capacity = CapacityModel(closed(course, fleet, now).places, fleet.tenants, terms.rules)
    for one in course.running:
        capacity.place(one.move.tenant, capacity.index[one.move.target])
    return capacity


def _ready(course: RunState, fleet: Fleet, terms: EvacuationTerms, now: float) -> list[Move]:
    """Return the waiting moves whose retry delay is over, in order."""
    found = [
        one for one in course.waiting
        if now >= again(one, course.failed.get(one.name, ()), terms.patience)
    ]  # fmt: skip
    links_ = schedule.links_of(fleet)
    return _one_for_each_on_trial(course, schedule.ordered(found, terms.windows.order, links_))


def _one_for_each_on_trial(course: RunState, ready: Sequence[Move]) -> list[Move]:
    """Return the moves, but only the first move to each host that was excluded before."""
    tried: set[str] = set()
    found = []
    for move in ready:
        record = course.records.get(move.target)
        if record is not None and record.outs:
            if move.target in tried:
                continue
            tried.add(move.target)
        found.append(move)
    return found


def again(move: Move, failures: Sequence[Failed], patience: RetryLimits) -> float:
    """Return the earliest time to retry a guest; 0 if its move has not failed yet.

    The wait is shorter if the last target was at fault, and none of the guest's failed moves was to
    the target of `move`.
    """
    if not failures:
        return 0.0
    fresh = failures[-1].blame is FailureSide.TARGET and all(
        one.target != move.target for one in failures
    )
    wait = patience.first_wait * float(2 ** (len(failures) - 1))
    return failures[-1].at + (wait * _ELSEWHERE if fresh else wait)


def wakes(course: RunState, now: float, patience: RetryLimits) -> float | None:
    """Return the time at which the next guest or excluded host may be retried.

    `now` and the result: on the run's monotonic clock. None if neither is pending.
    """
    times = [again(one, course.failed.get(one.name, ()), patience) for one in course.waiting]
    later = [one for one in times if one > now]
    if (comes := _comes_back(course, now)) is not None:
        later.append(comes)
    return min(later, default=None)


def _comes_back(course: RunState, now: float) -> float | None:
    """Return the time at which the next excluded host may be used again; None if there is none."""
    times = [one.out_until for one in course.records.values()]
    return min((one for one in times if now < one < math.inf), default=None)
