"""The best places for a few guests, by branch and bound. Pure."""

from collections.abc import Sequence

import numpy as np

from vmckpt.evacuate.fleet import Tenant
from vmckpt.evacuate.seating import Seating

_MOST = 20_000
"""Nodes that are looked at; with more a plan is no longer small."""


def best(seating: Seating, order: Sequence[Tenant]) -> list[int] | None:
    """The host of each, all of them placed, in the order given: at the least cost in a small plan,
    else at the least that was found in so many steps.

    None: not all can be placed, or that was not found out. `seating` is as before.
    """
    search = _Search(seating, order)
    search.go(0, 0.0)
    return search.found


class _Search:
    def __init__(self, seating: Seating, order: Sequence[Tenant]) -> None:
        self._seating, self._order = seating, order
        # A host that somebody comes from, or names, is like no other.
        named = {one.host for one in order}
        for one in order:
            named |= {at for at, _ in one.needs.never} | (one.needs.only or frozenset())
        self._named = [one.name if one.name in named else "" for one in seating.places]
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
        tenant, seating = self._order[depth], self._seating
        may, costs = seating.may(tenant), seating.costs(tenant)
        seen = set()
        for at in sorted(np.flatnonzero(may).tolist(), key=lambda one: float(costs[one])):
            kind = (self._named[at], float(costs[at]), seating.alike(at))
            if kind in seen:
                continue
            seen.add(kind)
            seating.sit(tenant, at)
            self._at.append(at)
            self.go(depth + 1, cost + float(costs[at]))
            self._at.pop()
            seating.rise(tenant, at)

    def _rest(self, depth: int) -> float:
        """No more than what the others will cost at the least."""
        return float(sum(self._seating.least(one) for one in self._order[depth:]))
