from dataclasses import replace

from tests.support.builders import sample
from vmckpt.migration import report
from vmckpt.migration.report import MigrationReport
from vmckpt.model.migration import Driver, JobTotals, Mode, Outcome
from vmckpt.units import MIB, Bytes, Seconds

SAMPLES = (
    sample(10.0, iteration=1, remaining=200 * MIB, transferred=0),
    sample(11.0, iteration=1, remaining=100 * MIB, transferred=100 * MIB),
    sample(12.0, iteration=2, remaining=50 * MIB, transferred=200 * MIB, dirty_rate=MIB),
    sample(12.5, iteration=3, remaining=10 * MIB, transferred=250 * MIB, dirty_rate=MIB),
)


def made(totals: JobTotals | None) -> MigrationReport:
    return MigrationReport(
        guest="web1", source="alpha", target="beta", outcome=Outcome.COMPLETED,
        driver=Driver.PEER_TO_PEER, began=Seconds(9.5), elapsed=Seconds(4.0), totals=totals,
        observed_downtime=Seconds(0.1204), samples=SAMPLES, mode=Mode.PRECOPY,
    )  # fmt: skip


TOTALS = JobTotals(
    total=Seconds(3.0), setup=Seconds(0.002), downtime=Seconds(0.083), iterations=4,
    transferred=Bytes(260 * MIB),
)  # fmt: skip


def test_a_pass_lasts_until_the_next_begins() -> None:
    rows = report.passes(SAMPLES, Seconds(9.5))

    assert [(row.number, row.began, row.lasted, row.sent) for row in rows] == [
        (1, 0.5, 2.0, 200 * MIB), (2, 2.5, 0.5, 50 * MIB), (3, 3.0, 0.0, 0),
    ]  # fmt: skip
    assert rows[0].remaining == 100 * MIB


def test_the_json_has_the_documented_keys_in_milliseconds_and_bytes() -> None:
    seen = report.as_json(made(TOTALS))

    assert {
        "guest", "source", "target", "outcome", "mode", "total_ms", "setup_ms", "downtime_ms",
        "iterations", "bytes_transferred", "samples", "decisions", "warnings",
    } <= set(seen)  # fmt: skip
    assert (seen["total_ms"], seen["setup_ms"], seen["downtime_ms"]) == (3000, 2, 83)
    assert seen["observed_downtime_ms"] == 120.4
    assert (seen["iterations"], seen["bytes_transferred"]) == (4, 260 * MIB)
    assert (seen["mode"], seen["driver"]) == ("precopy", "peer-to-peer")
    assert seen["samples"][0]["at_ms"] == 500


def test_without_final_statistics_the_samples_must_do_and_downtime_is_not_known() -> None:
    seen = report.as_json(made(None))

    assert (seen["total_ms"], seen["downtime_ms"]) == (4000, None)
    assert (seen["iterations"], seen["bytes_transferred"]) == (3, 250 * MIB)


def test_after_post_copy_the_downtime_is_that_of_the_events() -> None:
    seen = report.as_json(replace(made(None), switchover=Seconds(0.212)))

    assert seen["downtime_ms"] == 212
    assert report.as_json(replace(made(TOTALS), switchover=Seconds(9.0)))["downtime_ms"] == 83
