"""A plan under way: what has come of each move, who is tried again, and where. Pure.

One failure stops nobody else. A guest is tried again a few times, on another host if one failed it;
a host that fails one guest after the other is left out for a while, then tried with one guest.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from vmckpt.evacuation import bandwidth, schedule
from vmckpt.evacuation.bandwidth import Move, Under
from vmckpt.evacuation.plan import placement
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.schedule import Windows
from vmckpt.units import BytesPerSecond, Seconds

_ELSEWHERE = 0.1
"""Of the wait, where another host is tried: not at once, it may have been the network."""
_MORE = 1.1
"""A stream that does so many times what was known is news."""


class FailureSide(StrEnum):
    """Who a failure speaks against."""

    TARGET = "target"
    GUEST = "guest"
    """It fails wherever it goes: it does not converge, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How often and how soon something is tried again."""

    tries: int = 3
    """For each guest, in all."""
    first_wait: Seconds = Seconds(10.0)
    """After a guest's first failure; twice as long after each that follows."""
    trips: int = 2
    """So many failures one after the other leave a host out."""
    left_out: Seconds = Seconds(60.0)
    """For so long; twice as long each time."""
    most_outs: int = 4
    """So often; then for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvacuationTerms:
    """What a run keeps to."""

    rules: Rules = field(default_factory=Rules)
    windows: Windows = field(default_factory=Windows)
    patience: RetryLimits = field(default_factory=RetryLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One attempt that came to nothing; the guest runs where it was."""

    target: str
    at: float
    why: str
    blame: FailureSide


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How a host has done as a target, most recently."""

    failures: int = 0
    """One after the other."""
    out_until: float = 0.0
    outs: int = 0
    """How often it was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run is."""

    waiting: tuple[Move, ...] = ()
    running: tuple[Under, ...] = ()
    done: tuple[Move, ...] = ()
    left: tuple[Unplaced, ...] = ()
    hoping: tuple[Unplaced, ...] = ()
    """They would have a place if a host that is left out, or one on its way, changed something."""
    failed: Mapping[str, tuple[Failed, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By guest."""
    records: Mapping[str, Record] = field(default_factory=lambda: MappingProxyType({}))
    """By target."""
    carried: Mapping[str, BytesPerSecond] = field(default_factory=lambda: MappingProxyType({}))
    """The most that a stream of a source carried which had its links for itself."""
    paused: bool = False

    @property
    def over(self) -> bool:
        """Nothing is on its way and nothing waits."""
        return not self.waiting and not self.running and not self.hoping


def begins(course: RunState, moves: Iterable[Move]) -> RunState:
    """These have begun."""
    begun = tuple(moves)
    names = {one.name for one in begun}
    return replace(
        course, waiting=tuple(one for one in course.waiting if one.name not in names),
        running=_beside((*course.running, *(bandwidth.begin(one) for one in begun))),
    )  # fmt: skip


def _beside(running: Sequence[Under]) -> tuple[Under, ...]:
    """With those marked that share a link."""
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
    """These, and no others, are about to end: what they leave of their links others may begin to
    use. One that has been taken for such, and does not converge, is none any more."""
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
    """Its move has ended well."""
    under = _under(course, guest)
    records = {**course.records, under.move.target: Record()}
    return replace(
        course, running=_without(course, guest), done=(*course.done, under.move),
        records=MappingProxyType(records),
    )  # fmt: skip


def carrying(course: RunState, streams: Mapping[str, BytesPerSecond]) -> RunState:
    """What streams do, by guest: one that has its links for itself tells what others will."""
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
    """What streams were seen to carry counts more than what was forecast."""
    most = course.carried.get(move.source)
    return move if most is None else replace(move, tenant=replace(move.tenant, most=most))


def failed(course: RunState, guest: str, failure: Failed, patience: RetryLimits) -> RunState:
    """Its move has ended badly: it waits for another try, or is left where it is."""
    move = _under(course, guest).move
    tries = (*course.failed.get(guest, ()), failure)
    known = MappingProxyType({**course.failed, guest: tries})
    records = course.records
    if failure.blame is FailureSide.TARGET:
        told = _blamed(records.get(move.target, Record()), failure.at, patience)
        records = MappingProxyType({**records, move.target: told})
    after = replace(course, running=_without(course, guest), failed=known, records=records)
    if len(tries) >= patience.tries:
        why = f"tried {len(tries)} times, last to {failure.target}: {failure.why}"
        hint = f"see vmckpt jobs --all --guest {guest}; it is where it was"
        return replace(after, left=(*after.left, Unplaced(tenant=move.tenant, why=why, hint=hint)))
    return replace(after, waiting=(*after.waiting, move))


def given_up(course: RunState, guest: str, why: str, hint: str) -> RunState:
    """Its move has ended so that it is not tried again."""
    left = Unplaced(tenant=_under(course, guest).move.tenant, why=why, hint=hint)
    return replace(course, running=_without(course, guest), left=(*course.left, left))


def stuck(course: RunState, move: Move) -> RunState:
    """It has waited for room that nobody will make."""
    waiting = tuple(one for one in course.waiting if one != move)
    left = Unplaced(
        tenant=move.tenant, why=f"{move.target} has had no room for it, and nobody moves any more",
        hint="free memory there, or add a host",
    )  # fmt: skip
    return replace(course, waiting=waiting, left=(*course.left, left))


def _blamed(record: Record, at: float, patience: RetryLimits) -> Record:
    failures = record.failures + 1
    if failures < patience.trips and not record.outs:
        return replace(record, failures=failures)
    # After it was left out, a single failure is enough.
    until = at + patience.left_out * 2**record.outs
    if record.outs >= patience.most_outs:
        until = math.inf
    return Record(failures=failures, outs=record.outs + 1, out_until=until)


def _under(course: RunState, guest: str) -> Under:
    return next(one for one in course.running if one.move.name == guest)


def _without(course: RunState, guest: str) -> tuple[Under, ...]:
    return tuple(one for one in course.running if one.move.name != guest)


def closed(course: RunState, fleet: Fleet, now: float) -> Fleet:
    """The fleet without hosts that are left out just now."""
    under = {one.move.target for one in course.running}
    places = tuple(
        one if one.closed is not None
        else replace(one, closed=_out(course.records.get(one.name), now, busy=one.name in under))
        for one in fleet.places
    )  # fmt: skip
    return replace(fleet, places=places)


def _out(record: Record | None, now: float, *, busy: bool) -> str | None:
    """Why a host gets nobody just now; None: it may."""
    if record is None or not record.outs:
        return None
    if math.isinf(record.out_until):
        return f"failed {record.failures} guests, one after the other"
    if now < record.out_until:
        return f"failed {record.failures} guests; left out for {record.out_until - now:.0f} s more"
    return "is tried with one guest" if busy else None


def planned(
    course: RunState, fleet: Fleet, rules: Rules, now: float, *, asked: frozenset[str]
) -> RunState:
    """New targets for all that wait, by what is true now. `asked`: who is to leave at all."""
    usable = closed(course, fleet, now)
    under = [one.move for one in course.running]
    busy = {one.name for one in under}
    # Room that is promised to those on their way is taken.
    coming = tuple(
        replace(one.tenant, name=f"{one.name} on its way", host=one.target, stays="is on its way")
        for one in under
    )  # fmt: skip
    over = {one.tenant.name for one in course.left}
    leaving = [
        one for one in fleet.tenants
        if one.name in asked and one.name not in busy and one.name not in over
    ]  # fmt: skip
    # Who was given up makes no room for others, either.
    own = {
        one.name: replace(one, stays=one.stays or "it was given up") if one.name in over else one
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
    """Who has failed once on a host is tried there again before another one makes room for it."""
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
    """Not again to where it failed, as long as there is another host."""
    bad = {(one.target, "it failed there") for one in failures if one.blame is FailureSide.TARGET}
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
    """Who begins now. `changed`: as in schedule.start."""
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
    """Who may begin as soon as the links are free for it, in the order in which they are asked;
    their targets have room for each alone."""
    capacity = _seated(course, fleet, terms, now)
    return [
        one for one in _ready(course, fleet, terms, now)
        if capacity.reasons_against(one.tenant, capacity.index[one.target]) is None
    ]  # fmt: skip


def _seated(course: RunState, fleet: Fleet, terms: EvacuationTerms, now: float) -> CapacityModel:
    """All hosts with their guests, and with those that are on their way there."""
    capacity = CapacityModel(closed(course, fleet, now).places, fleet.tenants, terms.rules)
    for one in course.running:
        capacity.place(one.move.tenant, capacity.index[one.move.target])
    return capacity


def _ready(course: RunState, fleet: Fleet, terms: EvacuationTerms, now: float) -> list[Move]:
    """Whose wait is over, in order."""
    found = [
        one for one in course.waiting
        if now >= again(one, course.failed.get(one.name, ()), terms.patience)
    ]  # fmt: skip
    links_ = schedule.links_of(fleet)
    return _one_for_each_on_trial(course, schedule.ordered(found, terms.windows.order, links_))


def _one_for_each_on_trial(course: RunState, ready: Sequence[Move]) -> list[Move]:
    """Of those to hosts that were left out, the first."""
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
    """When a guest may be tried again: sooner on a host that has not failed it."""
    if not failures:
        return 0.0
    fresh = failures[-1].blame is FailureSide.TARGET and all(
        one.target != move.target for one in failures
    )
    wait = patience.first_wait * float(2 ** (len(failures) - 1))
    return failures[-1].at + (wait * _ELSEWHERE if fresh else wait)


def wakes(course: RunState, now: float, patience: RetryLimits) -> float | None:
    """When something is due that no ending move brings; None: nothing."""
    times = [again(one, course.failed.get(one.name, ()), patience) for one in course.waiting]
    later = [one for one in times if one > now]
    if (comes := _comes_back(course, now)) is not None:
        later.append(comes)
    return min(later, default=None)


def _comes_back(course: RunState, now: float) -> float | None:
    """When the next host that is left out is tried again; None: none is."""
    times = [one.out_until for one in course.records.values()]
    return min((one for one in times if now < one < math.inf), default=None)
