"""Decide which snapshots of a schedule are kept and which are deleted, and why. Pure.

Only snapshots made by the schedule itself are deleted. A rule keeps the newest snapshot of each of
the last N hours, days, … *that have a snapshot*. So a guest that was off for a month loses no
snapshots. A snapshot that a check found damaged does not take the place of an intact snapshot.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from vmckpt.policy.model import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The facts about a snapshot that retention needs."""

    id: str
    guest: str
    """The guest's UUID."""
    made_at: float
    schedule: str | None
    """The schedule that made the snapshot; None if it was not made by a schedule."""
    pinned: bool = False
    good: bool | None = None
    """Whether the snapshot passed its last check; None if it was not checked."""
    group: str | None = None
    """ID of the group snapshot to which the snapshot belongs."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether a snapshot is kept, and why."""

    id: str
    stays: bool
    reasons: tuple[str, ...]
    """All reasons, as text."""


def plan(
    snapshots: Sequence[Kept], keep: Keep, *, schedule: str, now: float, zone: tzinfo
) -> tuple[RetentionDecision, ...]:
    """Decide which snapshots are kept. Returns the decisions, newest first.

    `snapshots` must contain all snapshots of the guests; `now` is in seconds since 1970; days,
    weeks and months are those of the time zone `zone`.
    """
    reasons: dict[str, list[str]] = {one.id: _always(one, keep, schedule, now) for one in snapshots}
    # Snapshots dated in the future by a wrong clock must not displace good ones.
    known = sorted((one for one in snapshots if one.made_at <= now), key=_age)
    for guest in dict.fromkeys(one.guest for one in known):
        of_guest = [one for one in known if one.guest == guest]
        _last_good(of_guest, reasons)
        # While no snapshot is good, the rules also keep damaged snapshots, as a repair may succeed.
        good = any(one.good is not False for one in of_guest)
        mine = [
            one for one in of_guest
            if one.schedule == schedule and not (good and one.good is False)
        ]  # fmt: skip
        for rule in _RULES:
            _by_rule(rule, getattr(keep, rule.name), mine, reasons, zone)
    _together(snapshots, reasons)
    return tuple(
        RetentionDecision(one.id, bool(reasons[one.id]), tuple(reasons[one.id]) or (_goes(one),))
        for one in sorted(snapshots, key=_age)
    )


def _always(one: Kept, keep: Keep, schedule: str, now: float) -> list[str]:
    found = []
    if one.pinned:
        found.append("pinned")
    if one.schedule is None:
        found.append("not made by a schedule")
    elif one.schedule != schedule:
        found.append(f"made by schedule {one.schedule}, not {schedule}")
    elif keep.nothing_said:
        found.append("the schedule has no retention rules")
    if one.made_at > now:
        found.append("its date is in the future")
    return found


def _last_good(newest_first: Sequence[Kept], reasons: Mapping[str, list[str]]) -> None:
    """Keep the newest verified snapshot and the newest snapshot that is not known to be damaged.

    This applies whatever the rules say. The reasons are added to `reasons`, by snapshot ID.
    """
    proved = next((one for one in newest_first if one.good), None)
    if proved is not None:
        reasons[proved.id].append("the newest verified snapshot")
    newest = next((one for one in newest_first if one.good is not False), None)
    if newest is not None and newest is not proved:
        reasons[newest.id].append("the newest snapshot")
    if newest is None and newest_first:
        # All are damaged: the operator has to decide what can be salvaged from the newest.
        reasons[newest_first[0].id].append(
            "the newest snapshot; damaged, but no intact snapshot exists"
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    period: Callable[[datetime], str] | None
    """Returns the period to which a time belongs; None: each snapshot is its own period."""


def _hour(moment: datetime) -> str:
    # The UTC offset distinguishes the two hours of the same name when daylight saving time ends.
    return moment.strftime("%Y-%m-%d %H:00 %z")


def _week(moment: datetime) -> str:
    year, week, _ = moment.isocalendar()
    return f"{year} week {week}"


_RULES = (
    _Rule("last", None),
    _Rule("hourly", _hour),
    _Rule("daily", lambda moment: moment.strftime("%Y-%m-%d")),
    _Rule("weekly", _week),
    _Rule("monthly", lambda moment: moment.strftime("%Y-%m")),
)


def _by_rule(
    rule: _Rule,
    most: int,
    newest_first: Iterable[Kept],
    reasons: Mapping[str, list[str]],
    zone: tzinfo,
) -> None:
    seen: set[str] = set()
    for one in newest_first:
        moment = datetime.fromtimestamp(one.made_at, UTC).astimezone(zone)
        period = one.id if rule.period is None else rule.period(moment)
        if len(seen) >= most:
            return
        if period in seen:
            continue
        seen.add(period)
        what = "" if rule.period is None else f": the newest of {period}"
        reasons[one.id].append(f"{rule.name} {len(seen)} of {most}{what}")


def _together(snapshots: Iterable[Kept], reasons: Mapping[str, list[str]]) -> None:
    """Keep all snapshots of a group if one of them is kept, as only a complete group is useful.

    The reasons are added to `reasons`, by snapshot ID.
    """
    groups: dict[str, list[Kept]] = {}
    for one in snapshots:
        if one.group is not None:
            groups.setdefault(one.group, []).append(one)
    for group, members in groups.items():
        staying = [one.id for one in members if reasons[one.id]]
        for one in members:
            if staying and not reasons[one.id]:
                reasons[one.id].append(f"kept with group {group}: a rule keeps {staying[0]}")


def _goes(one: Kept) -> str:
    return "damaged, and an intact snapshot exists" if one.good is False else "not kept by any rule"


def _age(one: Kept) -> tuple[float, str]:
    """Return a sort key that orders snapshots newest first."""
    return -one.made_at, one.id
