"""What is shown of what is known."""

from collections.abc import Sequence

import pytest

from tests.tui import still
from tests.tui.still import DRAIN, ENDED, FLEET, MOVE, NOW, PART, SNAPSHOTS, entry, snapshot, step
from vmckpt.journal.evacuation_progress import summary, turns
from vmckpt.journal.jobs import JobDetail, News
from vmckpt.journal.records import Request, StepState
from vmckpt.model.guest import FleetNow
from vmckpt_tui import tables, wording
from vmckpt_tui.actions import Model, Scene, Where
from vmckpt_tui.screens import evacuation_view, migration_view, protection_view

MODEL = Model(
    fleet=FLEET, jobs=(MOVE, DRAIN, ENDED), protections={"p-9abc": entry()}, snapshots=SNAPSHOTS
)
DETAIL = JobDetail(
    view=MOVE, forecast=still.FORECAST, events=still.EVENTS, samples=still.SAMPLES, requests=()
)


def cells(columns: Sequence[object], row: object) -> list[str]:
    return [one.cell(row)[0] for one in columns]  # type: ignore[attr-defined]


def test_a_guest_is_shown_with_its_job_its_standby_and_its_last_snapshot() -> None:
    index = tables.index(MODEL, NOW)
    columns = tables.guest_columns(lambda: index)
    by_name = {one.name: cells(columns, one) for one in FLEET.guests}
    assert by_name["busy"][7] == "m-7k3f 72%"
    assert by_name["safe"][5] == "✓ 110 ms"
    assert by_name["web1"][6] == "15 min ago"
    assert by_name["old"][1] == "○ off"
    assert by_name["web1"][8] == "tier=web"


def test_hosts_say_what_is_wrong_with_them() -> None:
    index = tables.index(MODEL, NOW)
    told = {one.name: cells(tables.host_columns(lambda: index), one) for one in FLEET.hosts}
    assert told["alpha"][6] == "3"
    assert told["omega"][1:3] == ["–", "–"]
    assert told["omega"][7].startswith("✗ omega: no answer")
    assert told["delta"][7].startswith("! it is in maintenance")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["web1", "web2", "db1", "old", "busy", "safe"]),
        ("web", ["web1", "web2"]),
        ("ALPHA off", ["old"]),
        ("tier=web", ["web1"]),
        (still.uuid(3), ["db1"]),
        ("nobody", []),
    ],
)
def test_each_word_must_be_somewhere(text: str, names: list[str]) -> None:
    assert [one.name for one in tables.Finder().matching(FLEET.guests, text)] == names


def test_snapshots_are_trees_and_whoever_lost_a_parent_is_a_root() -> None:
    found = tables.leaves((*SNAPSHOTS, snapshot("s-eee", 1, "lost", parent="s-zzz")))
    told = [(one.snapshot.id, one.depth) for one in found]
    assert sorted(told) == [(id_, 0) for id_ in ("s-aaa", "s-bbb", "s-ccc", "s-ddd", "s-eee")]
    assert [id_ for id_, _ in told].index("s-bbb") == [id_ for id_, _ in told].index("s-aaa") + 1
    branch = tables.leaves((*SNAPSHOTS, snapshot("s-fff", 1, "other", parent="s-aaa")))
    assert {one.snapshot.id: one.depth for one in branch}["s-fff"] == 1


def test_a_line_of_ten_thousand_snapshots_and_a_circle_are_shown() -> None:
    line = [snapshot(f"s-{n}", 1, f"n{n}", parent=f"s-{n - 1}", made_at=n) for n in range(10_000)]
    assert len(tables.leaves(line)) == 10_000
    circle = [snapshot("s-a", 1, "a", parent="s-b"), snapshot("s-b", 1, "b", parent="s-a")]
    assert len(tables.leaves(circle)) == 2


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
    assert told[2] == "eva@desk asked for bandwidth bytes_per_second=1: not answered"


def test_news_are_added() -> None:
    more = still.sample(99, 30.0)
    after = migration_view.followed(DETAIL, News(view=MOVE, events=(), samples=(more,)))
    assert after.samples[-1] is more
    assert len(after.samples) == len(still.SAMPLES) + 1


def test_the_queue_of_moves_has_those_that_wait_behind_those_that_began() -> None:
    found = turns(DRAIN.operation, (PART,), ())
    assert [(one.guest, one.state) for one in found] == [("web1", "pre-copy"), ("web2", "waits")]
    told = summary(found)
    assert (told.arrived, told.moving, told.waiting, told.failed) == (0, 1, 1, 0)
    facts = evacuation_view.facts(DRAIN.operation, found, NOW)
    assert "0 arrived, 1 on their way, 1 wait" in facts[0]


@pytest.mark.parametrize(
    ("states", "shown", "counts"),
    [
        ([StepState.INTENDED], "▶ under way", (0, 2, 0, 0)),
        ([StepState.DONE], "✓ arrived", (1, 1, 0, 0)),
        ([StepState.FAILED], "✗ failed", (0, 1, 0, 1)),
        ([StepState.FAILED, StepState.DONE], "✓ arrived", (1, 1, 0, 0)),
    ],
)
def test_a_move_that_is_no_migration_is_shown_as_its_last_step_has_it(
    states: list[StepState], shown: str, counts: tuple[int, ...]
) -> None:
    steps = [step(state, f"host{at}", at) for at, state in enumerate(states)]
    found = turns(DRAIN.operation, (PART,), steps)
    assert [one.guest for one in found] == ["web1", "web2"]
    moved = found[1]
    assert (moved.tries, moved.target) == (len(states), f"host{len(states) - 1}")
    assert cells(evacuation_view.turn_columns(), moved)[2] == shown
    told = summary(found)
    assert (told.arrived, told.moving, told.waiting, told.failed) == counts


def test_hosts_of_an_evacuation_are_bars() -> None:
    lines = evacuation_view.loads(FLEET, DRAIN.operation, turns(DRAIN.operation, (PART,), ()))
    assert [one.split()[0] for one in lines] == ["alpha", "beta", "gamma"]
    assert lines[0].endswith("12 GiB of 64 GiB")


def test_a_protection_tells_parts_and_readiness() -> None:
    told = dict(protection_view.rows(entry()))
    assert told["standby"].startswith("✓ ready")
    assert told["behind (RPO)"] == "110 ms, worst 400 ms"
    names = [name for name, _, _ in protection_view.parts(entry(), 20)]
    assert names == ["stop", "state", "compare"]
    assert len(protection_view.strip(entry(), 60)) == 60
    beat = protection_view.beat(entry())
    assert beat is not None
    assert beat.pause_s == 0.012


def test_a_silent_primary_is_no_error() -> None:
    silent = entry()
    silent["says"]["alpha"] = {"error": "alpha is silent", "unreachable": True}
    assert protection_view.beat(silent) is None
    assert protection_view.strip(silent, 60) == ""
    assert dict(protection_view.rows(silent))["in the way"] == "alpha is silent"


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.01, 0.5, 0.999, 1.0, 7.0])
def test_a_bar_is_as_wide_as_asked(share: float) -> None:
    assert len(wording.bar(share, 10)) == 10


def test_a_guest_is_called_by_its_uuid_if_its_name_is_none_for_a_command() -> None:
    scene = Scene(where=Where.FLEET, model=MODEL)
    assert scene.called(still.guest(1, "web1", "alpha")) == "web1"
    assert scene.called(still.guest(7, "--force", "alpha")) == still.uuid(7)
    assert scene.called(still.guest(8, "مرحبا", "alpha")) == still.uuid(8)
    twins = Model(fleet=FleetNow(at=NOW, guests=(
        still.guest(1, "twin", "alpha"), still.guest(2, "twin", "beta")
    )))  # fmt: skip
    assert Scene(where=Where.FLEET, model=twins).called(twins.fleet.guests[0]) == still.uuid(1)
