"""Moves that make hosts' loads more equal and pay for themselves. Pure.

Load is the share of a host's memory that is promised to guests. What unequal loads cost is counted
as the sum of their squares, as `CapacityModel.costs` does: it is least where all are equal. A move
is proposed only if it reduces that sum enough (so that no guest is moved to and fro for nothing)
and if it saves more over the next hour than it costs while it lasts.
"""

from dataclasses import dataclass

import numpy as np

from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant
from vmckpt.units import Seconds

LEAST = 0.002
"""Of the sum of squares, that a move must take away: two hosts of one size that are 58 % and 50 %
full, and a guest of 3 % between them."""
_HOUR = Seconds(3600.0)
_COST = 0.1
"""While a guest moves, both of its hosts and their links are worse off by so much."""
_MOST = 1000
_FULLEST = 10
"""Hosts that somebody may leave at a time: a guest of an emptier one has nothing to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """One move."""

    tenant: Tenant
    target: str
    gain: float
    """Of the sum of squared loads."""


def propose(fleet: Fleet, rules: Rules) -> list[Proposed]:
    """Best first; none if nothing is worth it. Nobody is moved twice."""
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
    """The host that it gains most on; None: it is not worth it anywhere."""
    gains = np.where(capacity.allowed_hosts(tenant), capacity.gains(tenant), -np.inf)
    at = int(gains.argmax())
    gain, place = float(gains[at]), capacity.places[at]
    takes = tenant.travels / min(links[tenant.host], links[place.name])
    if gain < LEAST or gain * _HOUR < _COST * takes:
        return None
    return Proposed(tenant=tenant, target=place.name, gain=gain)
