"""The plan of an evacuation, which is shown for confirmation before any guest moves. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from vmckpt.evacuation import restart
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.plan import forecast, placement
from vmckpt.evacuation.plan.fleet import Fleet, Tenant
from vmckpt.evacuation.plan.forecast import Load, PlanForecast
from vmckpt.evacuation.plan.inventory import FleetView, TravelMethod
from vmckpt.evacuation.plan.placement import Assignment, Unplaced
from vmckpt.evacuation.state import EvacuationTerms
from vmckpt.evacuation.task import Task
from vmckpt.migration.forecast.forecast import Range, open_ended
from vmckpt.model.disk import Room
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import Bytes, BytesPerSecond, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The results of preflight and forecast for one guest and one target."""

    policy: str
    mode: str
    blockers: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    total: Range | None = None
    """Duration in seconds; None if unknown."""
    downtime: Range | None = None
    sent: Range | None = None
    """Bytes to be sent; None if unknown."""
    bandwidth: Range | None = None
    """Expected bandwidth of the guest's stream, in bytes per second; None if unknown."""
    link: BytesPerSecond | None = None
    """Measured bandwidth of the network between the hosts; None if it was not measured."""
    rooms: tuple[Room, ...] = ()
    """Space that the guest's images need on the target."""
    known: bool = True
    """Whether the bandwidth between the hosts was measured. If not, the high ends of the durations
    are only defaults for the order of the moves, and are not shown."""

    def shown(self) -> "Checked":
        """Return the results to show to the operator: without high ends that are unknown."""
        if self.known:
            return self
        return replace(self, total=open_ended(self.total), downtime=open_ended(self.downtime))


Checks = Mapping[tuple[str, str], Checked]
"""Results of the checks, by guest and target."""
NO_CHECKS: Checks = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The moves with their order, and the resulting load of the hosts."""

    task: Task
    going: tuple[Assignment, ...]
    left: tuple[Unplaced, ...]
    shut_down: tuple[Tenant, ...]
    suspended: tuple[Tenant, ...]
    """Guests whose memory is saved on the host."""
    checks: Checks
    course: PlanForecast
    """The simulated run, with every duration in the middle of its range."""
    total: Range
    """Duration of the run, in seconds."""
    silent: Mapping[str, str]
    """Hosts that do not answer, with the reason."""
    starts: tuple[Tenant, ...] = ()
    """Guests that were stopped by an evacuation and will be started again."""
    not_started: tuple[Unplaced, ...] = ()
    """Guests that were stopped and that currently cannot be started again."""

    def check(self, going: Assignment) -> Checked | None:
        """Return the results for a move; None if it was not checked."""
        return self.checks.get((going.tenant.name, going.target))

    def shown_total(self) -> Range:
        """Return the duration of the run, in seconds; without a high end if it is unknown."""
        checks = [self.check(one) for one in self.going]
        known = all(one is None or one.known for one in checks)
        return self.total if known else Range(self.total.low, math.inf)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON data, with times in milliseconds and sizes in bytes."""
        begins = {one.move.name: one for one in self.course.steps if not one.detour}
        return {
            "kind": str(self.task.kind), "host": self.task.host,
            "moves": [self._move(one, begins) for one in self.going],
            "left": [_left(one) for one in self.left],
            "starts": [one.name for one in self.starts],
            "not_started": [_left(one) for one in self.not_started],
            "shut_down": [one.name for one in self.shut_down],
            "suspended": [one.name for one in self.suspended],
            "hosts": [_load(one) for one in self.course.loads],
            "total_ms": _range(self.shown_total()),
            "silent": dict(self.silent),
        }  # fmt: skip

    def _move(
        self, going: Assignment, begins: Mapping[str, forecast.ForecastMove]
    ) -> dict[str, Any]:
        found, step = self.check(going), begins.get(going.tenant.name)
        return {
            "guest": going.tenant.name, "from": going.tenant.host, "to": going.target,
            "why": going.why, "displaced": going.displaced,
            "policy": None if found is None else found.policy,
            "mode": None if found is None else found.mode,
            "expected_ms": _range(None if found is None else found.shown().total),
            "expected_downtime_ms": _range(None if found is None else found.shown().downtime),
            "begins_ms": None if step is None else _ms(step.begins),
            "ends_ms": None if step is None else _ms(step.ends),
            "warnings": [] if found is None else [one.as_json() for one in found.warnings],
        }  # fmt: skip


def _left(one: Unplaced) -> dict[str, Any]:
    return {"guest": one.tenant.name, "why": one.why, "hint": one.hint, "mend": one.hint}


def _ms(seconds: float) -> float | None:
    return None if seconds == float("inf") else round(seconds * 1000, 1)


def _range(one: Range | None) -> list[float | None] | None:
    return None if one is None else [_ms(one.low), _ms(one.high)]


def _load(one: Load) -> dict[str, Any]:
    return {
        "host": one.host, "memory": one.memory, "before": one.before, "most": one.most,
        "after": one.after, "cpus_before": one.cpus_before, "cpus_after": one.cpus_after,
    }  # fmt: skip


def without(fleet: Fleet, checks: Checks) -> Fleet:
    """Return the fleet; each guest's needs exclude the targets that preflight forbids."""
    never: dict[str, set[tuple[str, str]]] = {}
    for (guest, target), found in checks.items():
        if found.blockers:
            never.setdefault(guest, set()).add((target, found.blockers[0].text))
    tenants = tuple(
        replace(one, needs=replace(one.needs, never=one.needs.never | never[one.name]))
        if one.name in never else one
        for one in fleet.tenants
    )  # fmt: skip
    return replace(fleet, tenants=tenants)


def crowded(going: Sequence[Assignment], checks: Checks) -> Checks:
    """Return the moves whose images do not fit on the target in addition to the images of earlier
    moves, each with a blocker."""
    taken: dict[tuple[str, str], int] = {}
    found = {}
    for one in going:
        at = (one.tenant.name, one.target)
        check = checks.get(at)
        if check is None or check.blockers:
            continue
        short = [
            room for room in check.rooms
            if taken.get((one.target, room.device), 0) + room.needed > room.free
        ]  # fmt: skip
        if short:
            found[at] = replace(check, blockers=(_no_room(one.target, short[0]),))
            continue
        for room in check.rooms:
            key = (one.target, room.device)
            taken[key] = taken.get(key, 0) + room.needed
    return MappingProxyType(found)


def _no_room(target: str, room: Room) -> Finding:
    return Finding(
        code="disk-room", severity=Severity.BLOCKER, where=target,
        text=f"{show_bytes(room.needed)} needed in {room.folder}; {show_bytes(room.free)} free,"
        " but the images of other guests that move there need that space",
        hint="free some space there, or choose another directory",
    )  # fmt: skip


def expected(
    fleet: Fleet, going: Sequence[Assignment], checks: Checks, share: float | None
) -> Fleet:
    """Return the fleet with the forecast bytes of each move and the bandwidth of links and streams.

    `share`: 0 for the fastest case, 1 for the slowest; None for the middle. The bytes include pages
    that are sent again.
    """
    at = 0.5 if share is None else share
    sizes: dict[str, Bytes] = {}
    most: dict[str, BytesPerSecond] = {}
    speeds: dict[str, list[float]] = {}
    for one in going:
        found = checks.get((one.tenant.name, one.target))
        if found is None:
            continue
        if found.sent is not None and found.sent.high != float("inf"):
            sizes[one.tenant.name] = Bytes(max(1, round(found.sent.at(at))))
        if found.bandwidth is not None and found.bandwidth.low > 0:
            stream = BytesPerSecond(max(1, round(found.bandwidth.at(1 - at))))
            if found.link is not None:
                most[one.tenant.name] = stream
            for host in (one.tenant.host, one.target):
                speeds.setdefault(host, []).append(found.link or stream)
    return Fleet(
        tuple(
            replace(one, link=BytesPerSecond(max(1, round(max(speeds[one.name])))))
            if one.name in speeds else one
            for one in fleet.places
        ),
        tuple(
            replace(one, size=sizes.get(one.name, one.size), most=most.get(one.name, one.most))
            if one.name in sizes or one.name in most else one
            for one in fleet.tenants
        ),
    )  # fmt: skip


def placed(fleet: Fleet, asked: frozenset[str], terms: EvacuationTerms) -> placement.Placement:
    """Return the placement of the guests named in `asked`."""
    leaving = [one for one in fleet.tenants if one.name in asked]
    return placement.place(fleet, leaving, terms.rules)


def made(
    task: Task, seen: FleetView, found: placement.Placement, checks: Checks, terms: EvacuationTerms
) -> Plan:
    """Build the plan from a placement whose moves have all been checked."""
    fleet = task.fleet(seen)
    plays = [
        forecast.play(world, _moves(world, found.going), terms.rules, terms.windows)
        for world in (expected(fleet, found.going, checks, share) for share in (0.0, None, 1.0))
    ]
    stuck = {one.name for one in plays[1].stuck}
    stops = [one for one in fleet.tenants if one.name in task.to_stop(seen)]
    saved = {one.name for one in stops if seen.known[one.name].suspends}
    wakes = restart.decide(task, seen)
    return Plan(
        task=task, going=tuple(one for one in found.going if one.tenant.name not in stuck),
        left=(*found.left, *(_never(one) for one in found.going if one.tenant.name in stuck)),
        shut_down=tuple(one for one in stops if one.name not in saved),
        suspended=tuple(one for one in stops if one.name in saved),
        checks=checks, course=plays[1],
        total=Range(min(one.total for one in plays), max(one.total for one in plays)),
        silent=seen.silent, starts=tuple(wakes.starts.values()), not_started=wakes.left,
    )  # fmt: skip


def _never(going: Assignment) -> Unplaced:
    return Unplaced(
        tenant=going.tenant,
        why=f"{going.target} has no room for this guest in any order of the moves",
        hint="free up memory on another host, so that a guest can move there temporarily",
    )  # fmt: skip


def _moves(fleet: Fleet, going: Sequence[Assignment]) -> list[Move]:
    tenants = {one.name: one for one in fleet.tenants}
    return [
        Move(tenant=tenants[one.tenant.name], source=one.tenant.host, target=one.target)
        for one in going
    ]


def worded(
    left: Iterable[Unplaced], seen: FleetView, checks: Checks = NO_CHECKS
) -> tuple[Unplaced, ...]:
    """Return `left` with better reasons and hints: for a standby, its guest and how to remove the
    standby; for a guest with a blocker, the blocker's hint."""

    def one(found: Unplaced) -> Unplaced:
        known = seen.known.get(found.tenant.name)
        if known is None or known.way is not TravelMethod.ANEW:
            return _mended(found, checks)
        guest = known.guest.name
        why = f"the standby of {guest}, which runs elsewhere; no other host can take it"
        return replace(
            found,
            why=f"{why}: {found.why}",
            hint=f"remove the standby with vmckpt unprotect {guest}",
        )

    return tuple(one(found) for found in left)


def _mended(left: Unplaced, checks: Checks) -> Unplaced:
    for (guest, _), found in checks.items():
        if guest == left.tenant.name and found.blockers and found.blockers[0].text in left.why:
            return replace(left, hint=found.blockers[0].hint or left.hint)
    return left
