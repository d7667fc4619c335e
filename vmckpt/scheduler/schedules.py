"""Which schedules there are for which guests, and how often snapshots pay (`every: auto`). Pure."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vmckpt.errors import PolicyError
from vmckpt.journal.records import Operation
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.policy.calendar import Interval
from vmckpt.policy.model import Auto, Policy, Schedule
from vmckpt.policy.select import Subject, choose
from vmckpt.scheduler.agenda import GuestPlace, Order
from vmckpt.snapshot import interval
from vmckpt.units import Seconds, show_seconds
from vmckpt.util.config_file import likely

LEAST, MOST = Seconds(300.0), Seconds(86400.0)
_SLOWER = 0.3
"""Share of its work that a guest loses at most while it is captured."""
_UNKNOWN = Seconds(5.0)
"""Taken for the cost before there was one."""
_LATEST = 9


@dataclass(frozen=True, slots=True)
class OptimalInterval:
    """An interval, and the arithmetic."""

    when: Interval
    text: str


def optimal_interval(auto: Auto, past: Sequence[Operation], now: float) -> OptimalInterval:
    """The interval for a guest, from its operations, the latest first."""
    cost, how = _cost(past)
    # A guest that was put back in its own place had been lost.
    failures = sum(one.kind == "restore" and one.outcome == Outcome.COMPLETED for one in past)
    watched = Seconds(max(0.0, now - min((one.began_at for one in past), default=now)))
    between, why = interval.between_failures(watched, failures, auto.one_failure_in)
    found = interval.pace(cost, between, least=LEAST, most=MOST)
    # Whole seconds: a schedule that moves by parts of them looks like a new one each time.
    every = Seconds(float(round(found.interval)))
    return OptimalInterval(Interval(every), f"{how}; {why}; {found.reason}")


def _cost(past: Sequence[Operation]) -> tuple[Seconds, str]:
    told = [
        (one.report["pause_ms"] / 1000, one.report["took_ms"] / 1000)
        for one in past
        if one.kind == "snapshot" and one.outcome == Outcome.COMPLETED and one.report is not None
        and {"pause_ms", "took_ms"} <= one.report.keys()
    ][:_LATEST]  # fmt: skip
    if not told:
        return _UNKNOWN, f"C = {show_seconds(_UNKNOWN)}, as nothing is known of it yet"
    pause = statistics.median(one for one, _ in told)
    took = statistics.median(one for _, one in told)
    cost = Seconds(pause + _SLOWER * took)
    return cost, (
        f"C = {show_seconds(pause)} + {_SLOWER:.0%} of {show_seconds(took)}"
        f" = {show_seconds(cost)}, of the last {len(told)}"
    )


Reckon = Callable[[str, Auto], OptimalInterval]
"""The interval for a guest (its UUID)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighted:
    """A guest where it was last seen."""

    place: GuestPlace
    subject: Subject


def sighted(
    found: Sequence[tuple[Host, Guest]],
    silent: Collection[str],
    before: Mapping[str, Sighted],
) -> dict[str, Sighted]:
    """All guests by UUID: where they are, or were before their host fell silent."""
    seen: dict[str, Sighted] = {}
    for host, guest in found:
        known = seen.get(guest.uuid)
        if known is not None and (known.place.active or not guest.state.is_active):
            continue
        seen[guest.uuid] = Sighted(
            place=GuestPlace(
                uuid=guest.uuid, name=guest.name, host=host.name, active=guest.state.is_active
            ),
            subject=Subject(
                guest=guest.name,
                guest_labels=guest.labels,
                host_labels=host.labels,
                memory=guest.memory,
            ),
        )
    for uuid, one in before.items():
        shown = seen.get(uuid)
        # Its definition may be left on a host that answers, while it runs on one that does not.
        if one.place.host in silent and (shown is None or not shown.place.active):
            seen[uuid] = replace(one, place=replace(one.place, seen=False))
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSelection:
    """Which policy counts for whom, if not the one that is for each guest."""

    guests: Collection[str] = ()
    """Names or UUIDs; none: all."""
    policy: str | None = None


def ordered(
    guests: Collection[Sighted],
    policies: Sequence[Policy],
    stores: Sequence[str],
    wanted: ScheduleSelection,
    reckon: Reckon,
) -> tuple[list[Order], list[str]]:
    """All schedules of all guests, by name; and what is wrong, one line each."""
    orders: list[Order] = []
    wrong = dict.fromkeys(_missing(guests, wanted.guests))
    for one in sorted(guests, key=lambda one: one.place.name):
        if wanted.guests and not {one.place.name, one.place.uuid} & set(wanted.guests):
            continue
        try:
            policy = choose(policies, one.subject, wanted.policy).policy
        except PolicyError as exc:
            wrong[f"{one.place.name}: {exc}"] = None
            continue
        for schedule in policy.snapshots:
            unknown = _unknown(schedule, stores)
            if unknown is not None:
                wrong[f"{policy.file}: schedule {schedule.name}: {unknown}"] = None
                continue
            orders.append(_order(one.place, policy, schedule, stores, reckon))
    return orders, list(wrong)


def _missing(guests: Collection[Sighted], wanted: Collection[str]) -> Iterable[str]:
    """Those asked for that no host has."""
    names = {one.place.name for one in guests}
    for name in sorted(set(wanted) - names - {one.place.uuid for one in guests}):
        hint = likely(name, names) if names else ""
        yield f"no guest {name!r} on hosts that answer{hint}"


def _unknown(schedule: Schedule, stores: Sequence[str]) -> str | None:
    """Why its stores cannot be used."""
    if not stores:
        return "the inventory names no store; add stores: {near: /srv/vmckpt} to it"
    for name in (schedule.store, *(one.store for one in schedule.copies)):
        if name is not None and name not in stores:
            return f"no store {name!r} in the inventory{likely(name, stores)}"
    if schedule.store is None and stores[0] in (one.store for one in schedule.copies):
        return f"they land in {stores[0]}, the first store, and are not copied there"
    return None


def _order(
    place: GuestPlace, policy: Policy, schedule: Schedule, stores: Sequence[str], reckon: Reckon
) -> Order:
    when, text = schedule.when, None
    if isinstance(when, Auto):
        found = reckon(place.uuid, when)
        when, text = found.when, found.text
    return Order(
        place=place,
        policy=policy.name,
        schedule=schedule,
        store=schedule.store or stores[0],
        when=when,
        reckoned=text,
    )
