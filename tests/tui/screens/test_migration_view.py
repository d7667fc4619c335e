"""What is shown of one migration."""

import pytest

from tests.tui import still
from tests.tui.still import MOVE, NOW
from vmckpt.journal.jobs import JobDetail, News
from vmckpt.journal.records import Request
from vmckpt_tui.screens import migration_view

DETAIL = JobDetail(
    view=MOVE, forecast=still.FORECAST, events=still.EVENTS, samples=still.SAMPLES, requests=()
)


def test_passes_are_counted_from_the_samples() -> None:
    found = migration_view.passes(still.SAMPLES)
    assert [one.number for one in found] == [1, 2, 3]
    assert found[0].dirty is None
    assert found[1].lasted == pytest.approx(7.5)
    assert found[1].sent == pytest.approx(1500 << 20, rel=0.01)


def test_the_forecast_is_two_lines_from_all_to_nothing() -> None:
    lines = migration_view.remaining(still.SAMPLES, still.FORECAST)
    assert lines.band == (((0.0, 18.0), (4021.0, 0.0)), ((0.0, 29.0), (4021.0, 0.0)))
    assert migration_view.remaining(still.SAMPLES, None).band is None


def test_a_long_migration_has_no_more_points_than_a_screen() -> None:
    many = [still.sample(number, number / 5) for number in range(1, 30_000)]
    times, _ = migration_view.rates(many).solid
    assert len(times) <= 802
    assert times[0] == many[0].at
    assert times[-1] == many[-1].at


def test_facts_tell_the_downtime_beside_its_limit() -> None:
    told = dict(migration_view.facts(DETAIL))
    assert told["downtime now"] == "340 ms, limit 300 ms"
    assert told["time left"] == "4.0 s to 9.0 s"
    assert told["throttle"] == "none"


def test_the_story_has_decisions_with_reasons_and_what_was_asked_for() -> None:
    asked = Request(
        id=1, operation="m-7k3f", kind="bandwidth", arguments={"bytes_per_second": 1},
        asked_by="eva@desk", asked_at=NOW - 15, taken_at=None, answered_at=None, ok=None,
        answer=None,
    )  # fmt: skip
    detail = JobDetail(view=MOVE, forecast=None, events=still.EVENTS, samples=(), requests=(asked,))
    told = [one.text for one in migration_view.story(detail)]
    assert told[0] == "phase=setup"
    assert "because the last passes got no smaller remaining_mib=900" in told[-1]
    assert told[2] == "eva@desk requested bandwidth bytes_per_second=1: not answered"


def test_news_are_added() -> None:
    more = still.sample(99, 30.0)
    after = migration_view.followed(DETAIL, News(view=MOVE, events=(), samples=(more,)))
    assert after.samples[-1] is more
    assert len(after.samples) == len(still.SAMPLES) + 1
