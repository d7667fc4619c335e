"""Which snapshots of a schedule stay and which go, and why each. Pure.

Only what the schedule made itself can go. A rule keeps the newest snapshot of each of the last so
many hours, days, … *that have one*; a guest that was off for a month loses none meanwhile. One that
a check found damaged takes no place from a good one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from vmckpt.policy.model import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What must be known of a snapshot."""

    id: str
    guest: str
    """Its UUID."""
    made_at: float
    schedule: str | None
    """The schedule that made it; None: a person did."""
    pinned: bool = False
    good: bool | None = None
    """What the last check of it said; None: none was made."""
    group: str | None = None
    """The consistent cut it is part of."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """What becomes of a snapshot."""

    id: str
    stays: bool
    reasons: tuple[str, ...]
    """Every one there is, for people."""


def plan(
    snapshots: Sequence[Kept], keep: Keep, *, schedule: str, now: float, zone: tzinfo
) -> tuple[RetentionDecision, ...]:
    """A verdict on each of them, newest first. All snapshots of the guests must be given."""
    reasons: dict[str, list[str]] = {one.id: _always(one, keep, schedule, now) for one in snapshots}
    # A clock that was wrong must not make room of good snapshots for those of the future.
    known = sorted((one for one in snapshots if one.made_at <= now), key=_age)
    for guest in dict.fromkeys(one.guest for one in known):
        of_guest = [one for one in known if one.guest == guest]
        _last_good(of_guest, reasons)
        # While none is good the rules keep what they would keep anyway: it may be mended.
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
        found.append("the schedule has no retention")
    if one.made_at > now:
        found.append("made in the future, by its clock")
    return found


def _last_good(newest_first: Sequence[Kept], reasons: Mapping[str, list[str]]) -> None:
    """Whatever the rules say, a guest can go back to something that was proved, or may be good."""
    proved = next((one for one in newest_first if one.good), None)
    if proved is not None:
        reasons[proved.id].append("the last one that was verified")
    newest = next((one for one in newest_first if one.good is not False), None)
    if newest is not None and newest is not proved:
        reasons[newest.id].append("the newest one")
    if newest is None and newest_first:
        # All are damaged: what can be saved of the newest is for a person to say.
        reasons[newest_first[0].id].append("damaged, but there is no good one")


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    period: Callable[[datetime], str] | None
    """Which stretch of time a moment belongs to; None: each snapshot is one of its own."""


def _hour(moment: datetime) -> str:
    # With the offset: when clocks are put back, one hour comes twice.
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
    """A consistent cut is of use only whole: what one guest keeps of it, all keep."""
    groups: dict[str, list[Kept]] = {}
    for one in snapshots:
        if one.group is not None:
            groups.setdefault(one.group, []).append(one)
    for group, members in groups.items():
        staying = [one.id for one in members if reasons[one.id]]
        for one in members:
            if staying and not reasons[one.id]:
                reasons[one.id].append(f"part of the cut {group}, of which {staying[0]} stays")


def _goes(one: Kept) -> str:
    return "damaged, and there is a good one" if one.good is False else "no rule keeps it"


def _age(one: Kept) -> tuple[float, str]:
    """Newest first."""
    return -one.made_at, one.id
