"""Track the used memory and CPUs of hosts while a plan is made. Pure.

The model determines whether a guest fits on a host, and the cost of placing it there.

The values of all hosts are kept in arrays, so that a guest is compared with a thousand hosts in
microseconds.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vmckpt.evacuation.plan.fleet import Needs, Place, Rules, Tenant
from vmckpt.units import show_bytes

Flags = NDArray[np.bool_]
Numbers = NDArray[np.float64]
_EPS = 1e-9
NO_STORAGE = "no storage"
"""Prefix of the reason against a host that does not see a disk."""


class CapacityModel:
    """Used and free capacity of all hosts. `place` and `remove` change the model, so each plan has
    its own copy."""

    def __init__(self, places: Sequence[Place], tenants: Iterable[Tenant], rules: Rules) -> None:
        self.places, self._rules = tuple(places), rules
        self.index = {one.name: number for number, one in enumerate(self.places)}
        count = len(self.places)
        self._room: Numbers = np.array(
            [one.memory * (1 - rules.keep_free) for one in places], dtype=np.float64
        )
        self._size: Numbers = np.array([max(1, one.memory) for one in places], dtype=np.float64)
        self._cpus: Numbers = np.array([one.cpus for one in places], dtype=np.float64)
        self.used: Numbers = np.zeros(count)
        self.cpus_used: Numbers = np.zeros(count)
        self._open: Flags = np.array([one.closed is None for one in places], dtype=np.bool_)
        self._apart: dict[str, dict[int, int]] = {}
        self._fits: dict[Needs, Flags] = {}
        self._near: dict[str, Numbers] = {}
        self._kinds = [
            (one.memory, one.cpus, one.offers, one.machines, one.networks, one.storage,
             frozenset(one.labels.items()))
            for one in places
        ]  # fmt: skip
        for tenant in tenants:
            if tenant.host in self.index:
                self.place(tenant, self.index[tenant.host])

    def place(self, tenant: Tenant, at: int) -> None:
        """Count the guest's memory and CPUs on the host with index `at`."""
        self._add(tenant, at, 1)

    def remove(self, tenant: Tenant, at: int) -> None:
        """Stop counting the guest's memory and CPUs on the host with index `at`."""
        self._add(tenant, at, -1)

    def _add(self, tenant: Tenant, at: int, sign: int) -> None:
        self.used[at] += sign * tenant.memory
        self.cpus_used[at] += sign * tenant.cpus
        for group in tenant.apart:
            seats = self._apart.setdefault(group, {})
            seats[at] = seats.get(at, 0) + sign

    def capable_hosts(self, needs: Needs) -> Flags:
        """Return which hosts meet `needs`, regardless of their load."""
        found = self._fits.get(needs)
        if found is None:
            found = np.fromiter(
                (lacks(needs, one) is None for one in self.places), dtype=np.bool_,
                count=len(self.places),
            )  # fmt: skip
            self._fits[needs] = found
        return found

    def allowed_hosts(self, tenant: Tenant) -> Flags:
        """Return which hosts the guest may move to now according to all hard rules."""
        found = self._open & self.capable_hosts(tenant.needs)
        found &= self.used + tenant.memory <= self._room + _EPS
        found &= self.cpus_used + tenant.cpus <= self._cpus + _EPS
        for group in tenant.apart:
            for at, count in self._apart.get(group, {}).items():
                if count > 0:
                    found[at] = False
        if tenant.host in self.index:
            found[self.index[tenant.host]] = False
        return found

    def costs(self, tenant: Tenant) -> Numbers:
        """Return the cost of placing the guest on each host; lower is better."""
        weights = self._rules.weights
        load = self.used / self._size
        more = tenant.memory / self._size
        # The sum of squared loads is lowest when all loads are equal.
        found = weights.spread * ((load + more) ** 2 - load**2)
        if tenant.prefers:
            liked = np.fromiter(
                (_likes(tenant, one) for one in self.places), dtype=np.float64,
                count=len(self.places),
            )  # fmt: skip
            found = found + weights.prefer * (1 - liked)
        return np.asarray(found + weights.stay_near * self._far(tenant.host), dtype=np.float64)

    @property
    def load(self) -> Numbers:
        """Used share of each host's memory."""
        return np.asarray(self.used / self._size, dtype=np.float64)

    def gains(self, tenant: Tenant) -> Numbers:
        """Return how much the sum of squared loads falls if the guest moves to each host."""
        load = self.load
        share = tenant.memory / self._size
        at = self.index[tenant.host]
        leaves = load[at] ** 2 - (load[at] - share[at]) ** 2
        return np.asarray(leaves - ((load + share) ** 2 - load**2), dtype=np.float64)

    def least(self, tenant: Tenant) -> float:
        """Return a lower bound of the guest's cost, whichever guests are placed before it; inf if
        no open host meets its needs."""
        may = self._open & self.capable_hosts(tenant.needs)
        if tenant.host in self.index:
            may[self.index[tenant.host]] = False
        if not may.any():
            return float("inf")
        if self._rules.weights.spread >= 0:
            return float(self.costs(tenant)[may].min())  # loads only grow
        more = tenant.memory / self._size
        load = self.used / self._size
        spread = self._rules.weights.spread * ((load + more) ** 2 - load**2)
        fullest = self._rules.weights.spread * (1 - (1 - more) ** 2)
        return float((self.costs(tenant) - spread + fullest)[may].min())

    def _far(self, host: str) -> Numbers:
        found = self._near.get(host)
        if found is None:
            ours = self.places[self.index[host]].storage if host in self.index else frozenset()
            found = np.array(
                [1 - len(ours & one.storage) / len(ours) if ours else 0.0 for one in self.places]
            )
            self._near[host] = found
        return found

    def shortage(self, tenant: Tenant, at: int) -> float:
        """Return how many bytes of memory a host lacks for the guest; 0 or less if it fits."""
        return float(self.used[at] + tenant.memory - self._room[at])

    def reasons_against(self, tenant: Tenant, at: int, *, exact: bool = True) -> str | None:
        """Return the first reason why the guest may not move to a host now; None if it may.

        `exact`: whether the reason contains the missing amount, which differs from host to host.
        """
        place = self.places[at]
        if place.name == tenant.host:
            return "the guest is already there"
        if place.closed is not None:
            return place.closed
        if (why := lacks(tenant.needs, place)) is not None:
            return why
        for group in sorted(tenant.apart):
            if self._apart.get(group, {}).get(at, 0) > 0:
                return f"another guest of group {group} is there"
        if (short := self.shortage(tenant, at)) > _EPS:
            return f"lacks {show_bytes(round(short))} of memory" if exact else "too little memory"
        if self.cpus_used[at] + tenant.cpus > self._cpus[at] + _EPS:
            cores = self.cpus_used[at] + tenant.cpus - self._cpus[at]
            return f"lacks {cores:g} cores" if exact else "too little CPU"
        return None

    def alike(self, at: int) -> Hashable:
        """Return a key that is equal for hosts that are interchangeable for the next guest."""
        apart = tuple(sorted(group for group, on in self._apart.items() if on.get(at, 0) > 0))
        full = (float(self.used[at]), float(self.cpus_used[at]), apart)
        return (self._kinds[at], full)


def lacks(needs: Needs, place: Place) -> str | None:
    """Return what a host lacks for a guest, regardless of its load; None if it lacks nothing."""
    if needs.only is not None and not needs.only:
        return "the only host that the guest can move to is not a requested target"
    if needs.only is not None and place.name not in needs.only:
        return f"the guest can move only to {', '.join(sorted(needs.only))}"
    if against := [why for at, why in needs.never if at == place.name]:
        return min(against)  # deterministic
    if needs.cpu is not None and needs.cpu not in place.offers:
        return f"no CPU {needs.cpu}"
    if needs.machine is not None and needs.machine not in place.machines:
        return f"no machine type {needs.machine}"
    for what, wanted, has in (
        ("no network", needs.networks, place.networks),
        (NO_STORAGE, needs.storage, place.storage),
    ):
        if missing := wanted - has:
            return f"{what} {', '.join(sorted(missing))}"
    for key, value in sorted(needs.labels):
        if place.labels.get(key) != value:
            return f"not labelled {key}={value}"
    return None


def _likes(tenant: Tenant, place: Place) -> float:
    """Return the share of the guest's preferred labels that the host has."""
    met = sum(place.labels.get(key) == value for key, value in tenant.prefers)
    return met / len(tenant.prefers)
