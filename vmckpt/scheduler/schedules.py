"""Assign schedules to guests, and compute the interval of `every: auto`. Pure."""

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
from vmckpt.units import Seconds, show_count, show_seconds
from vmckpt.util.config_file import likely

LEAST, MOST = Seconds(300.0), Seconds(86400.0)
_SLOWER = 0.3
"""Maximum fraction of its performance that a guest loses during a capture."""
_UNKNOWN = Seconds(5.0)
"""The assumed cost of a snapshot until the first snapshot is taken."""
_LATEST = 9
"""Number of recent snapshots from which the cost is computed."""


@dataclass(frozen=True, slots=True)
class OptimalInterval:
    """An interval, and how it was computed."""

    when: Interval
    text: str


def optimal_interval(auto: Auto, past: Sequence[Operation], now: float) -> OptimalInterval:
    """Compute the snapshot interval for a guest from its past operations.

    `past`: the operations, latest first. `now`: seconds since 1970. See snapshot.interval for the
    formula.
    """
    cost, how = _cost(past)
    # A restore in place means that the guest had been lost.
    failures = sum(one.kind == "restore" and one.outcome == Outcome.COMPLETED for one in past)
    watched = Seconds(max(0.0, now - min((one.began_at for one in past), default=now)))
    between, why = interval.between_failures(watched, failures, auto.one_failure_in)
    found = interval.pace(cost, between, least=LEAST, most=MOST)
    # Rounded to seconds, because a schedule that changes by milliseconds looks new each time.
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
        return _UNKNOWN, f"C = {show_seconds(_UNKNOWN)} (assumed: no recent snapshot is recorded)"
    pause = statistics.median(one for one, _ in told)
    took = statistics.median(one for _, one in told)
    cost = Seconds(pause + _SLOWER * took)
    return cost, (
        f"C = {show_seconds(pause)} + {_SLOWER:.0%} of {show_seconds(took)}"
        f" = {show_seconds(cost)}, from the last {show_count(len(told), 'snapshot')}"
    )


Reckon = Callable[[str, Auto], OptimalInterval]
"""Computes the interval for the guest with a given UUID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighted:
    """A guest and the host on which it was last seen."""

    place: GuestPlace
    subject: Subject


def sighted(
    found: Sequence[tuple[Host, Guest]],
    silent: Collection[str],
    before: Mapping[str, Sighted],
) -> dict[str, Sighted]:
    """Return all guests, by UUID, each on its host or, if the host does not answer, its last host.

    `silent`: names of hosts that do not answer. `before`: the previous result of this function.
    """
    seen: dict[str, Sighted] = {}
    for host, guest in found:
        known = seen.get(guest.uuid)
        if known is not None and (known.place.active or not guest.state.is_active):
            continue
        seen[guest.uuid] = Sighted(
            place=GuestPlace(uuid=guest.uuid, name=guest.name, host=host.name, state=guest.state),
            subject=Subject(
                guest=guest.name,
                guest_labels=guest.labels,
                host_labels=host.labels,
                memory=guest.memory,
            ),
        )
    for uuid, one in before.items():
        shown = seen.get(uuid)
        # A guest that is running on a silent host may still be defined on a host that answers.
        if one.place.host in silent and (shown is None or not shown.place.active):
            seen[uuid] = replace(one, place=replace(one.place, seen=False))
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSelection:
    """The guests whose schedules to run, and a policy that overrides the policy of each guest."""

    guests: Collection[str] = ()
    """Names or UUIDs; empty: all guests."""
    policy: str | None = None
    """Name of the policy; None: the policy selected for each guest."""


def ordered(
    guests: Collection[Sighted],
    policies: Sequence[Policy],
    stores: Sequence[str],
    wanted: ScheduleSelection,
    reckon: Reckon,
) -> tuple[list[Order], list[str]]:
    """Return the orders of all selected guests, sorted by guest name, and a line per problem."""
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
    """Yield a message for each selected guest that was not found."""
    names = {one.place.name for one in guests}
    for name in sorted(set(wanted) - names - {one.place.uuid for one in guests}):
        hint = likely(name, names) if names else ""
        yield f"guest {name!r} was not found on any host that answered{hint}"


def _unknown(schedule: Schedule, stores: Sequence[str]) -> str | None:
    """Return why the schedule's stores cannot be used, or None."""
    if not stores:
        return "no stores in the inventory; add, for example, stores: {near: /srv/vmckpt}"
    for name in (schedule.store, *(one.store for one in schedule.copies)):
        if name is not None and name not in stores:
            return f"no store {name!r} in the inventory{likely(name, stores)}"
    if schedule.store is None and stores[0] in (one.store for one in schedule.copies):
        return (
            f"copies: {stores[0]} is already the schedule's store, because store: is not set and"
            f" {stores[0]} is the first store in the inventory; set store:, or copy to another"
            " store"
        )
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
