"""Propose moves that balance the hosts' loads and are worth their cost. Pure.

The load of a host is the share of its memory that is allocated to guests. The cost of unequal loads
is the sum of their squares, as in `CapacityModel.costs`: it is lowest when all loads are equal. A
move is proposed only if it reduces that sum enough (so that guests do not move back and forth) and
if it saves more over the next hour than it costs while it runs.
"""

from dataclasses import dataclass

import numpy as np

from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant
from vmckpt.units import Seconds

LEAST = 0.002
"""Minimum reduction of the sum of squares by a move. For example, a guest that uses 3 % of a host's
memory is moved between two hosts of equal size that are 58 % and 50 % full."""
_HOUR = Seconds(3600.0)
_COST = 0.1
"""Cost of a running move for its hosts and links, in the same unit as the sum of squares."""
_MOST = 1000
_FULLEST = 10
"""Number of fullest hosts whose guests are considered: moving guests off emptier hosts gains
nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A proposed move."""

    tenant: Tenant
    target: str
    gain: float
    """Reduction of the sum of squared loads."""


def propose(fleet: Fleet, rules: Rules) -> list[Proposed]:
    """Return the proposed moves, the best first, at most one for each guest."""
    capacity = CapacityModel(fleet.places, fleet.tenants, rules)
    links = {one.name: float(one.link) for one in fleet.places}
    able = [one for one in fleet.tenants if one.stays is None and one.host in capacity.index]
    found: list[Proposed] = []
    while len(found) < _MOST:
        full = {capacity.places[at].name for at in (-capacity.load).argsort()[:_FULLEST].tolist()}
        best = max(
            (move for one in able if one.host in full
             and (move := _best(capacity, one, links)) is not None),
            key=lambda one: (one.gain / one.tenant.travels, one.tenant.name), default=None,
        )  # fmt: skip
        if best is None:
            break
        capacity.remove(best.tenant, capacity.index[best.tenant.host])
        capacity.place(best.tenant, capacity.index[best.target])
        able = [one for one in able if one is not best.tenant]
        found.append(best)
    return found


def _best(capacity: CapacityModel, tenant: Tenant, links: dict[str, float]) -> Proposed | None:
    """Return the guest's move with the largest gain; None if that move is not worth its cost."""
    gains = np.where(capacity.allowed_hosts(tenant), capacity.gains(tenant), -np.inf)
    at = int(gains.argmax())
    gain, place = float(gains[at]), capacity.places[at]
    takes = tenant.travels / min(links[tenant.host], links[place.name])
    if gain < LEAST or gain * _HOUR < _COST * takes:
        return None
    return Proposed(tenant=tenant, target=place.name, gain=gain)
