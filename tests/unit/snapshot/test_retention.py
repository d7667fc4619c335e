from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.policy.model import Keep
from vmckpt.snapshot.retention import Kept, RetentionDecision, plan

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2025, 6, 20, 12, 30, tzinfo=UTC).timestamp()
HOUR, DAY = 3600.0, 86400.0
KEEPS = st.builds(
    Keep, last=st.integers(0, 3), hourly=st.integers(0, 4), daily=st.integers(0, 4),
    weekly=st.integers(0, 3), monthly=st.integers(0, 3),
)  # fmt: skip
SNAPSHOTS = st.lists(
    st.builds(
        Kept, id=st.uuids().map(str), guest=st.sampled_from("ab"),
        made_at=st.floats(NOW - 90 * DAY, NOW + DAY), schedule=st.sampled_from(["mine", "other"])
        | st.none(), pinned=st.booleans(), good=st.sampled_from([None, True, False]),
        group=st.sampled_from([None, None, "g1", "g2"]),
    ),
    max_size=25, unique_by=lambda one: one.id,
)  # fmt: skip


def snap(name: str, age: float, **changes: object) -> Kept:
    made = Kept(id=name, guest="a", made_at=NOW - age, schedule="mine")
    return replace(made, **changes)  # type: ignore[arg-type]


def verdicts(
    snapshots: Iterable[Kept], keep: Keep, *, zone: ZoneInfo = BERLIN, now: float = NOW
) -> dict[str, RetentionDecision]:
    made = plan(list(snapshots), keep, schedule="mine", now=now, zone=zone)
    return {one.id: one for one in made}


def stays(snapshots: Iterable[Kept], keep: Keep, zone: ZoneInfo = BERLIN) -> str:
    return "".join(one.id for one in verdicts(snapshots, keep, zone=zone).values() if one.stays)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        pytest.param(Keep(), "abcdefgh", id="no rule"),
        pytest.param(Keep(last=3), "abc", id="last"),
        pytest.param(Keep(hourly=3), "ace", id="hourly"),
        pytest.param(Keep(daily=2), "af", id="daily"),
        pytest.param(Keep(daily=99), "afgh", id="more than there are"),
        pytest.param(Keep(weekly=3), "ah", id="weekly"),
        pytest.param(Keep(monthly=2), "ah", id="monthly"),
        pytest.param(Keep(last=2, daily=2, monthly=2), "abfh", id="together"),
    ],
)
def test_each_rule_keeps_the_newest_of_its_stretches(keep: Keep, left: str) -> None:
    ages = {"a": 0.1, "b": 0.3, "c": 1, "d": 1.2, "e": 3, "f": 26, "g": 50, "h": 24 * 40}

    assert stays([snap(name, age * HOUR) for name, age in ages.items()], keep) == left


def test_why_each_stays_or_goes_is_told() -> None:
    found = verdicts(
        [snap("a", 0.1 * HOUR), snap("b", 26 * HOUR), snap("c", 27 * HOUR)], Keep(last=1, daily=2)
    )

    assert found["a"].reasons == (
        "the newest snapshot", "last 1 of 1", "daily 1 of 2: the newest of 2025-06-20",
    )  # fmt: skip
    assert found["b"].reasons == ("daily 2 of 2: the newest of 2025-06-19",)
    assert found["c"] == RetentionDecision("c", stays=False, reasons=("not kept by any rule",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pinned": True}, "pinned"),
        ({"schedule": None}, "not made by a schedule"),
        ({"schedule": "weekly"}, "made by schedule weekly, not mine"),
        ({"good": True}, "the newest verified snapshot"),
        ({"made_at": NOW + 1}, "its date is in the future"),
    ],
)
def test_some_stay_whatever_the_rules_say(change: dict[str, object], reason: str) -> None:
    found = verdicts([snap("a", 1), replace(snap("b", 99 * DAY), **change)], Keep(last=1))  # type: ignore[arg-type]

    assert found["b"] == RetentionDecision("b", stays=True, reasons=(reason,))


def test_the_future_takes_no_place_from_the_present() -> None:
    assert stays([snap("f", -HOUR), snap("a", 1), snap("b", 2)], Keep(last=1)) == "fa"


def test_a_damaged_one_takes_no_place_and_goes_once_there_is_a_good_one() -> None:
    bad = snap("a", 1, good=False)
    found = verdicts([bad, snap("b", 2), snap("c", 3)], Keep(last=1))

    assert [one.stays for one in found.values()] == [False, True, False]
    assert found["a"].reasons == ("damaged, and an intact snapshot exists",)
    alone = verdicts([bad, snap("d", 5, good=False)], Keep(last=2))
    assert [one.stays for one in alone.values()] == [True, True]  # it may be mended


def test_the_last_verified_one_stays_beside_newer_ones_that_were_not() -> None:
    snapshots = [snap("a", 1), snap("b", 2), snap("c", 3, good=True), snap("d", 4, good=True)]

    assert stays(snapshots, Keep(last=1)) == "ac"


def test_guests_do_not_take_each_others_places() -> None:
    snapshots = [snap("a", 1), snap("b", 2, guest="b"), snap("c", 3), snap("d", 4, guest="b")]

    assert stays(snapshots, Keep(last=1)) == "ab"


def test_a_cut_stays_whole() -> None:
    snapshots = [
        snap("a", 1), snap("b", 2, guest="b"), snap("c", 9, group="g"),
        snap("d", 9, guest="b", group="g", pinned=True),
    ]  # fmt: skip
    found = verdicts(snapshots, Keep(last=1))

    assert found["c"].reasons == ("kept with group g: a rule keeps d",)


@pytest.mark.parametrize(("zone", "left"), [("Europe/Berlin", "ab"), ("UTC", "a")])
def test_a_day_is_that_of_the_zone(zone: str, left: str) -> None:
    """23:30 and 22:30 in UTC are two days in Berlin."""
    midnight = datetime(2025, 1, 10, tzinfo=UTC).timestamp()
    snapshots = [
        snap(name, NOW - midnight + age) for name, age in (("a", 0.5 * HOUR), ("b", 1.5 * HOUR))
    ]

    assert stays(snapshots, Keep(daily=9), ZoneInfo(zone)) == left


def test_the_hour_that_comes_twice_in_autumn_is_two() -> None:
    twice = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)  # 02:30 in summer time, then in winter time
    snapshots = [
        snap(name, NOW - (twice + timedelta(hours=hours)).timestamp())
        for name, hours in (("a", 1), ("b", 0))
    ]

    assert stays(snapshots, Keep(hourly=9)) == "ab"
    assert stays(snapshots, Keep(daily=9)) == "a"


def test_weeks_at_the_turn_of_the_year_are_not_cut() -> None:
    days = [datetime(2024, 12, 30, 12, tzinfo=UTC), datetime(2025, 1, 2, 12, tzinfo=UTC)]
    snapshots = [snap(name, NOW - day.timestamp()) for name, day in zip("ba", days, strict=True)]

    assert stays(snapshots, Keep(weekly=9)) == "a"
    assert stays(snapshots, Keep(monthly=9)) == "ab"


@given(SNAPSHOTS, KEEPS)
def test_only_its_own_go_and_never_the_last_good_one(snapshots: list[Kept], keep: Keep) -> None:
    found = verdicts(snapshots, keep)
    gone = {one.id: one for one in snapshots if not found[one.id].stays}

    assert len(found) == len(snapshots)
    assert all(one.reasons for one in found.values())
    assert all(one.schedule == "mine" and not one.pinned for one in gone.values())
    assert not gone or not keep.nothing_said
    for guest in "ab":
        of = [one for one in snapshots if one.guest == guest and one.made_at <= NOW]
        left = [one for one in of if one.id not in gone]
        assert not of or left
        assert any(one.good for one in left) == any(one.good for one in of)
        assert any(one.good is not False for one in left) == any(
            one.good is not False for one in of
        )
    cuts = {one.group for one in snapshots if one.group and one.id not in gone}
    assert not any(one.group in cuts for one in gone.values())


@given(SNAPSHOTS, KEEPS)
def test_pruning_twice_is_pruning_once(snapshots: list[Kept], keep: Keep) -> None:
    found = verdicts(snapshots, keep)
    left = [one for one in snapshots if found[one.id].stays]

    assert all(one.stays for one in verdicts(left, keep).values())


@given(KEEPS, st.integers(1, 400))
def test_day_after_day_never_more_stay_than_the_rules_say(keep: Keep, days: int) -> None:
    most = keep.last + keep.hourly + keep.daily + keep.weekly + keep.monthly
    left: list[Kept] = []
    for day in range(days):
        now = NOW + day * DAY
        left.append(Kept(id=f"{day}", guest="a", made_at=now, schedule="mine"))
        found = verdicts(left, keep, now=now)
        left = [one for one in left if found[one.id].stays]

    assert keep.nothing_said or len(left) <= most + 1
