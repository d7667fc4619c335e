"""Choose a target host for each guest. Pure.

The guests that are hardest to place go first: those with the fewest possible hosts, then the
largest. Each guest goes to the host with the lowest cost. The sum of the costs depends only on the
final placement, so branch and bound finds the optimum of a small plan. If no host has room for a
guest, one other guest may make room: another leaving guest gets another target, or, if the rules
allow it, a guest that would have stayed moves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vmckpt.evacuation.plan.capacity import NO_STORAGE, CapacityModel, lacks
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant
from vmckpt.units import Bytes, show_bytes, show_count

_MOST = 20_000
"""Maximum number of nodes of the search."""


def best(capacity: CapacityModel, order: Sequence[Tenant]) -> list[int] | None:
    """Return the host of each guest in `order`; None if no placement of all of them was found.

    The placement has the lowest cost if the search needs at most _MOST nodes, otherwise the lowest
    cost found so far. `capacity` is unchanged afterwards.
    """
    search = _Search(capacity, order)
    search.go(0, 0.0)
    return search.found


class _Search:
    def __init__(self, capacity: CapacityModel, order: Sequence[Tenant]) -> None:
        self._capacity, self._order = capacity, order
        # A host that a guest leaves or names is not interchangeable with others.
        named = {one.host for one in order}
        for one in order:
            named |= {at for at, _ in one.needs.never} | (one.needs.only or frozenset())
        self._named = [one.name if one.name in named else "" for one in capacity.places]
        self._at: list[int] = []
        self._least = np.inf
        self.found: list[int] | None = None
        self.nodes = 0

    def go(self, depth: int, cost: float) -> None:
        self.nodes += 1
        if self.nodes > _MOST or cost + self._rest(depth) >= self._least:
            return
        if depth == len(self._order):
            self._least, self.found = cost, list(self._at)
            return
        tenant, capacity = self._order[depth], self._capacity
        may, costs = capacity.allowed_hosts(tenant), capacity.costs(tenant)
        seen = set()
        for at in sorted(np.flatnonzero(may).tolist(), key=lambda one: float(costs[one])):
            kind = (self._named[at], float(costs[at]), capacity.alike(at))
            if kind in seen:
                continue
            seen.add(kind)
            capacity.place(tenant, at)
            self._at.append(at)
            self.go(depth + 1, cost + float(costs[at]))
            self._at.pop()
            capacity.remove(tenant, at)

    def _rest(self, depth: int) -> float:
        """Return a lower bound of the cost of placing the guests from number `depth` on."""
        return float(sum(self._capacity.least(one) for one in self._order[depth:]))


SMALL = 10
"""Maximum number of guests that are placed by search."""
_NAMED = 6
"""Maximum number of hosts whose reasons against a guest are listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The new host of a guest."""

    tenant: Tenant
    target: str
    why: str
    displaced: bool = False
    """Whether the guest moves only to make room for another guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """A guest that is not moved or not started, with the reason and a hint."""

    tenant: Tenant
    why: str
    hint: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The assignments of a plan."""

    going: tuple[Assignment, ...]
    left: tuple[Unplaced, ...]


def place(fleet: Fleet, leaving: Iterable[Tenant], rules: Rules) -> Placement:
    """Find a host for each guest in `leaving`.

    A guest's memory also counts as used on its current host, until the guest has left.
    """
    planning = _Planning(fleet, tuple(leaving), rules)
    planning.place_all()
    planning.repair()
    return planning.result()


class _Planning:
    """A plan that is being created."""

    def __init__(self, fleet: Fleet, leaving: Sequence[Tenant], rules: Rules) -> None:
        self._rules = rules
        self._capacity = CapacityModel(fleet.places, fleet.tenants, rules)
        self._leaving = [one for one in leaving if one.stays is None]
        self._stuck = [one for one in leaving if one.stays is not None]
        names = {one.name for one in leaving}
        self._others: dict[int, list[Tenant]] = {}
        for one in fleet.tenants:
            at = self._capacity.index.get(one.host)
            if at is not None and one.stays is None and one.name not in names:
                self._others.setdefault(at, []).append(one)
        self._target: dict[str, int] = {}
        self._displaced: dict[str, Tenant] = {}
        self._unplaced: list[Tenant] = []

    def place_all(self) -> None:
        capacity = self._capacity
        order = self._hardest_first()
        if len(order) <= SMALL and (found := best(capacity, order)) is not None:
            for tenant, at in zip(order, found, strict=True):
                self._sit(tenant, at)
            return
        for tenant in order:
            self._sit(tenant, cheapest(capacity, tenant))

    def _hardest_first(self) -> list[Tenant]:
        choices = {
            one.needs: int(self._capacity.capable_hosts(one.needs).sum()) for one in self._leaving
        }
        return sorted(
            self._leaving,
            key=lambda one: (-one.priority, choices[one.needs], -one.memory, one.name),
        )

    def _sit(self, tenant: Tenant, at: int | None) -> None:
        if at is None:
            self._unplaced.append(tenant)
            return
        self._target[tenant.name] = at
        self._capacity.place(tenant, at)

    def repair(self) -> None:
        """Make room for each guest without a host by moving one other guest."""
        waiting, self._unplaced = self._unplaced, []
        for tenant in waiting:
            if not self._make_room(tenant):
                self._unplaced.append(tenant)

    def _make_room(self, tenant: Tenant) -> bool:
        """Make room with one other guest: the smallest suitable leaving guest gets another target,
        or else the smallest other guest moves. Returns whether that succeeded."""
        capacity = self._capacity
        offers = []
        for at in np.flatnonzero(capacity.capable_hosts(tenant.needs)).tolist():
            short = capacity.shortage(tenant, at)
            offers += [
                (one.name not in self._target, one.memory, at, one)
                for one in self._movable(at) if one.memory >= short
            ]  # fmt: skip
        offers.sort(key=lambda one: (one[0], one[1], one[2], one[3].name))
        return any(self._exchange(tenant, other, at) for _, _, at, other in offers)

    def _movable(self, at: int) -> list[Tenant]:
        """Return guests that will be on the host and could be placed elsewhere."""
        found = [one for one in self._leaving if self._target.get(one.name) == at]
        if self._rules.may_displace:
            found += [one for one in self._others.get(at, ()) if one.name not in self._displaced]
        return found

    def _exchange(self, tenant: Tenant, other: Tenant, at: int) -> bool:
        capacity = self._capacity
        capacity.remove(other, at)
        if capacity.reasons_against(tenant, at) is None:
            capacity.place(tenant, at)
            elsewhere = cheapest(capacity, other, never=at)
            if elsewhere is not None:
                capacity.place(other, elsewhere)
                self._target[tenant.name] = at
                self._target[other.name] = elsewhere
                if other not in self._leaving:
                    self._displaced[other.name] = other
                return True
            capacity.remove(tenant, at)
        capacity.place(other, at)
        return False

    def result(self) -> Placement:
        going = [
            self._going(one, displaced=False) for one in self._leaving if one.name in self._target
        ]
        going += [self._going(one, displaced=True) for one in self._displaced.values()]
        left = [self._left(one) for one in self._unplaced]
        left += [
            Unplaced(tenant=one, why=str(one.stays), hint=f"check the guest on {one.host}")
            for one in self._stuck
        ]
        return Placement(tuple(going), tuple(left))

    def _going(self, tenant: Tenant, *, displaced: bool) -> Assignment:
        capacity = self._capacity
        at = self._target[tenant.name]
        place = capacity.places[at]
        free = Bytes(max(0, round(place.memory - capacity.used[at])))
        choices = int(capacity.capable_hosts(tenant.needs).sum()) - (place.name != tenant.host)
        why = f"{show_bytes(free)} free afterwards"
        if displaced:
            why = f"makes room; {why}"
        elif choices <= 1:
            why = f"the only possible host; {why}"
        return Assignment(tenant=tenant, target=place.name, why=why, displaced=displaced)

    def _left(self, tenant: Tenant) -> Unplaced:
        return explain(self._capacity, tenant)


def cheapest(capacity: CapacityModel, tenant: Tenant, *, never: int | None = None) -> int | None:
    """Return the index of the host with the lowest cost for the guest; None if no host is allowed.

    `never`: index of a host that must not be returned, if any.
    """
    may = capacity.allowed_hosts(tenant)
    if never is not None:
        may[never] = False
    if not may.any():
        return None
    costs = np.where(may, capacity.costs(tenant), np.inf)
    return int(costs.argmin())


def explain(capacity: CapacityModel, tenant: Tenant) -> Unplaced:
    """Return why no host can take the guest, with a hint on what would help."""
    others = [at for at, place in enumerate(capacity.places) if place.name != tenant.host]
    if not others:
        return Unplaced(
            tenant=tenant, why="there is no other host", hint="add a host to the inventory"
        )
    few = len(others) <= _NAMED
    reasons = {
        capacity.places[at].name: capacity.reasons_against(tenant, at, exact=few) or "possible"
        for at in others
    }
    if few:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    else:
        told = Counter(reasons.values()).most_common(4)
        why = "; ".join(f"{show_count(count, 'host')}: {reason}" for reason, count in told)
    return Unplaced(tenant=tenant, why=why, hint=_hint(capacity, tenant))


def _hint(capacity: CapacityModel, tenant: Tenant) -> str:
    able = [
        at for at, place in enumerate(capacity.places)
        if place.closed is None and place.name != tenant.host
        and lacks(tenant.needs, place) is None
    ]  # fmt: skip
    full = [at for at in able if capacity.shortage(tenant, at) > 0]
    if full:
        at = min(full, key=lambda one: capacity.shortage(tenant, one))
        short = show_bytes(Bytes(round(capacity.shortage(tenant, at))))
        return f"free up {short} on {capacity.places[at].name}, or lower keep_free in the policy"
    if able:
        name = capacity.places[able[0]].name
        return (
            f"on {name}: {capacity.reasons_against(tenant, able[0])};"
            " fix this, or change the guest's policy"
        )
    closed = [place.name for place in capacity.places if place.closed is not None]
    lacking = Counter(
        why for place in capacity.places
        if place.closed is None and place.name != tenant.host
        and (why := lacks(tenant.needs, place)) is not None
    )  # fmt: skip
    if lacking:
        needed = lacking.most_common(1)[0][0]
        if needed.startswith(NO_STORAGE):
            missing = needed.removeprefix(NO_STORAGE).strip()
            return (
                f"make {missing} available on another host, or set storage: {{copy: thin}} in the"
                " guest's policy to copy the disks"
            )
        return f"fix this on another host: {needed}"
    return (
        f"make a host usable again, such as {closed[0]}; see vmckpt hosts and vmckpt maintenance"
        " list"
        if closed
        else "add a host to the inventory"
    )
