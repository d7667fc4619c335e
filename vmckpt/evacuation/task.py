"""Describe a run: which guests leave which host, and where they may go. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from vmckpt.errors import BadInput, run_doctor, some
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant, Weights
from vmckpt.evacuation.plan.inventory import FleetView, Known, TravelMethod, started
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.schedule import Windows
from vmckpt.evacuation.state import EvacuationTerms, RetryLimits
from vmckpt.policy.model import Evacuation
from vmckpt.units import Bytes

FLEET = "all hosts"
"""Used instead of a host's name in a run that is not about a single host."""


class Kind(StrEnum):
    """What a run does; also the operation's kind in the journal."""

    EVACUATE = "evacuate"
    REPOPULATE = "repopulate"
    BALANCE = "balance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The order for a run. Raises BadInput if `host` is also one of the targets."""

    kind: Kind
    host: str = FLEET
    to: frozenset[str] | None = None
    """The permitted targets; None: any host."""
    goes: frozenset[tuple[str, str]] = frozenset()
    """Guests with a fixed target: UUID and host."""
    called: frozenset[tuple[str, str]] = frozenset()
    """UUIDs and names of guests, for messages about guests that are not found on any host."""
    start: frozenset[str] = frozenset()
    """UUIDs of guests that are to be started on the host again."""
    policy: str | None = None
    """Name of the policy for all guests and for the run; None: each guest's own policy, and policy
    `maintenance` for the run."""

    def __post_init__(self) -> None:
        if self.host in (self.to or ()):
            raise BadInput(
                f"{self.host} cannot be both evacuated and a target",
                hint="name other hosts with --to",
            )

    def asked(self, seen: FleetView) -> frozenset[str]:
        """Return the names, as in `seen`, of the guests that still have to move."""
        if self.kind is not Kind.EVACUATE:
            goes = dict(self.goes)
            return frozenset(
                name for name, one in seen.known.items()
                if one.host != goes.get(one.guest.uuid, one.host)
            )  # fmt: skip
        there = {one.name for one in seen.fleet.tenants if one.host == self.host}
        return frozenset(there - self.to_stop(seen) - _stopped(seen))

    def unseen(self, seen: FleetView) -> tuple[Unplaced, ...]:
        """Return the guests that should move but cannot, and those that were not found while some
        hosts do not answer."""
        found = {one.guest.uuid for one in seen.known.values()}
        missing = sorted({uuid for uuid, _ in self.goes} - found)
        called, silent = dict(self.called), sorted(seen.silent)
        stuck = {name for uuid in missing for name in seen.stuck.get(uuid, ())}
        return *(
            Unplaced(tenant=one, why=str(one.stays), hint=f"check the guest on {one.host}")
            for one in seen.fleet.tenants if one.name in stuck and one.host != self.host
        ), *(
            Unplaced(
                tenant=Tenant(name=called.get(uuid, uuid), host="", memory=Bytes(0), cpus=0.0),
                why=f"not found; no answer from {some(silent)}",
                hint=run_doctor(silent),
            )
            for uuid in missing if silent and uuid not in seen.stuck
        )  # fmt: skip

    def to_stop(self, seen: FleetView) -> frozenset[str]:
        """Return the names of the guests that are to be shut down or suspended instead of moved."""
        if self.kind is not Kind.EVACUATE:
            return frozenset()
        return frozenset(
            one.name for one in seen.fleet.tenants
            if one.host == self.host and one.stays is None and _stops(seen.known.get(one.name))
        )  # fmt: skip

    def fleet(self, seen: FleetView) -> Fleet:
        """Return the fleet with this task's restrictions on placement."""
        asked = self.asked(seen)
        places = tuple(
            replace(one, closed="is being evacuated")
            if self.kind is Kind.EVACUATE and one.name == self.host else one
            for one in seen.fleet.places
        )  # fmt: skip
        goes = dict(self.goes)
        bound = {name: self.to for name in asked if self.to is not None} | {
            name: frozenset({goes[seen.known[name].guest.uuid]}) for name in asked if goes
        }
        tenants = tuple(
            replace(one, needs=replace(one.needs, only=_both(bound[one.name], one.needs.only)))
            if one.name in bound else one
            for one in _settled(seen, asked)
        )  # fmt: skip
        tenants = tuple(
            started(one, seen.known[one.name].guest) if self._wakes(one.name, seen) else one
            for one in tenants
        )
        return Fleet(places, _become(seen, asked, tenants))

    def _wakes(self, name: str, seen: FleetView) -> bool:
        """Return whether the guest is off and will use memory on the host again."""
        known = seen.known.get(name)
        return (
            known is not None and known.way is TravelMethod.OFFLINE and known.host == self.host
            and known.guest.uuid in self.start
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind), "host": self.host,
            "to": None if self.to is None else sorted(self.to),
            "goes": sorted(map(list, self.goes)), "called": sorted(map(list, self.called)),
            "start": sorted(self.start),
            "policy": self.policy,
        }  # fmt: skip

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Read a task from the journal. Raises KeyError, ValueError or TypeError if invalid."""
        to = told["to"]
        return cls(
            kind=Kind(told["kind"]), host=str(told["host"]),
            to=None if to is None else frozenset(map(str, to)),
            goes=frozenset((str(uuid), str(host)) for uuid, host in told["goes"]),
            called=frozenset((str(uuid), str(name)) for uuid, name in told.get("called", ())),
            start=frozenset(map(str, told["start"])),
            policy=told["policy"],
        )  # fmt: skip


def _settled(seen: FleetView, asked: frozenset[str]) -> tuple[Tenant, ...]:
    """Return the tenants, with every protected guest fixed to its host unless it is to leave that
    host.

    A guest may lose its standby only when its own host is evacuated.
    """
    return tuple(
        replace(one, stays="it is protected and would lose its standby")
        if one.stays is None and one.name not in asked and one.name in seen.known
        and seen.known[one.name].way is TravelMethod.SWITCH else one
        for one in seen.fleet.tenants
    )  # fmt: skip


def _stops(known: Known | None) -> bool:
    """Return whether the guest's policy shuts it down or suspends it."""
    return (
        known is not None
        and known.way is TravelMethod.LIVE
        and known.policy.evacuation.strategy.stops
    )


def _stopped(seen: FleetView) -> frozenset[str]:
    """Return the guests that are off and whose policy shuts them down or suspends them."""
    return frozenset(
        name for name, one in seen.known.items()
        if one.way is TravelMethod.OFFLINE and one.policy.evacuation.strategy.stops
    )  # fmt: skip


def _both(wanted: frozenset[str], only: frozenset[str] | None) -> frozenset[str]:
    return wanted if only is None else wanted & only


def _become(
    seen: FleetView, asked: frozenset[str], tenants: tuple[Tenant, ...]
) -> tuple[Tenant, ...]:
    """Return the tenants, counting no memory for standbys that take over: the memory is counted for
    the guest that moves there."""
    switched = {
        f"{name} on {host}"
        for name in asked if name in seen.known and seen.known[name].way is TravelMethod.SWITCH
        for one in tenants if one.name == name for host in one.needs.only or ()
    }  # fmt: skip
    return tuple(
        replace(one, memory=Bytes(0), cpus=0.0) if one.name in switched else one for one in tenants
    )


def terms(run: Evacuation, kind: Kind) -> EvacuationTerms:
    """Return the limits of a run, from the settings of its policy."""
    return EvacuationTerms(
        rules=Rules(
            keep_free=run.keep_free,
            weights=Weights(spread=run.spread, prefer=run.prefer, stay_near=run.stay_near),
            may_displace=run.displace and kind is Kind.EVACUATE,
        ),
        windows=Windows(
            per_source=run.per_source, per_target=run.per_target, total=run.at_once,
            order=run.order,
        ),
        patience=RetryLimits(tries=run.tries, first_wait=run.first_wait),
    )  # fmt: skip
