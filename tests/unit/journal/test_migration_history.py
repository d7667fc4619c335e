"""What past moves teach the next forecast."""

from dataclasses import replace

from tests.support.journals import WEB1
from vmckpt.journal.migration_history import past_move
from vmckpt.journal.store import Journal


def test_past_moves_tell_what_a_forecast_needs(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    rows = [
        {"bandwidth": 100, "lasted_ms": 3000, "dirty_rate": None},
        {"bandwidth": 200, "lasted_ms": 1000, "dirty_rate": 7},
        {"bandwidth": 0, "lasted_ms": 500, "dirty_rate": 5},
    ]
    report = {"total_ms": 5000, "setup_ms": 20, "downtime_ms": 80, "passes": rows}
    journal.finish(id_, "completed", {**report, "mode": "precopy"})
    journal.begin(WEB1)  # has not ended
    [move] = journal.recent_moves("alpha", "beta", 5)

    assert (move.guest, move.outcome, move.mode) == ("web1", "completed", "precopy")
    assert (move.total, move.setup, move.downtime) == (5.0, 0.02, 0.08)
    assert (move.bandwidth, move.dirty_rates) == (125, (7, 5))
    assert journal.recent_moves("beta", "alpha") == []
    assert journal.recent_moves("alpha", "beta", guest_uuid="another") == []


def test_what_a_past_move_was_held_to_is_known(journal: Journal) -> None:
    """It says nothing of what the link carries."""
    by_wish = replace(WEB1, detail={"wishes": {"bandwidth": 7}})
    for new, report, limit in (
        (WEB1, {}, None), (WEB1, {"bandwidth_limit": 5}, 5), (by_wish, {}, 7),
    ):  # fmt: skip
        id_ = journal.begin(new)
        journal.finish(id_, "completed", {"total_ms": 5000, **report})
        [move] = journal.recent_moves("alpha", "beta", 1)
        assert (move.id, move.limit) == (id_, limit)


def test_without_passes_it_is_all_bytes_by_all_the_time(journal: Journal) -> None:
    for report, bandwidth in (
        ({"total_ms": 2000, "bytes_transferred": 500}, 250), ({"total_ms": 2000}, None),
        ({"bytes_transferred": 500}, None),
    ):  # fmt: skip
        journal.finish(journal.begin(WEB1), "completed", report)
        [move] = journal.recent_moves("alpha", "beta", 1)
        assert (move.bandwidth, move.observed_downtime) == (bandwidth, None)


def test_one_that_has_not_ended_or_left_no_report_teaches_nothing(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    assert past_move(journal.operation(id_)) is None
    journal.finish(id_, "failed", None)
    assert past_move(journal.operation(id_)) is None
