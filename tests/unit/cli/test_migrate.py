"""What the report of a migration says."""

from dataclasses import replace

import pytest

from tests.support.builders import sample
from vmckpt.cli import migrate
from vmckpt.cli.progress import Progress
from vmckpt.migration.report import MigrationReport
from vmckpt.model.events import Checked
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Driver, JobTotals, Mode, Outcome
from vmckpt.units import MIB, Bytes, Seconds

TCG = Finding(
    code="tcg-lost-writes", severity=Severity.WARNING, where="web1", text="TCG may lose writes"
)
REPORT = MigrationReport(
    guest="web1", source="alpha", target="beta", outcome=Outcome.COMPLETED,
    driver=Driver.PEER_TO_PEER, began=Seconds(0.0), elapsed=Seconds(4.0), totals=None,
    observed_downtime=None, samples=(sample(1.0, transferred=MIB),), mode=Mode.POSTCOPY,
    policy="balanced", findings=(TCG,), warnings=("web1: TCG may lose writes", "beta is slow"),
)  # fmt: skip


def shown(report: MigrationReport, capsys: pytest.CaptureFixture[str]) -> str:
    migrate._show(report)
    return capsys.readouterr().out


def test_a_report_of_post_copy_has_the_downtime(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(replace(REPORT, switchover=Seconds(0.212)), capsys)
    assert "downtime, from libvirt's events 212 ms" in " ".join(told.split())
    assert "downtime" not in shown(REPORT, capsys)


def test_the_downtime_of_pre_copy_is_qemus(capsys: pytest.CaptureFixture[str]) -> None:
    totals = JobTotals(
        total=Seconds(3.0), setup=None, downtime=Seconds(0.083), iterations=2,
        transferred=Bytes(MIB),
    )  # fmt: skip
    told = shown(replace(REPORT, totals=totals, switchover=Seconds(0.5)), capsys)
    assert "downtime, from QEMU" in told
    assert "libvirt's events" not in told


def test_a_forecast_without_a_high_end_is_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    mark = {"expected": [3.5, None], "measured": 40.0, "covered": True, "width": None}
    told = shown(replace(REPORT, forecast={"score": {"total": mark}}), capsys)
    assert "3.5 s or more" in told
    assert "missed" not in told


def test_each_warning_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Preflight's warning was printed before the move, for each attempt, and in the report."""
    with Progress("web1 → beta") as progress:
        progress.take(Checked(findings=(TCG,)))
        progress.take(Checked(findings=(TCG, replace(TCG, text="another"))))
    migrate._show(replace(REPORT, warnings=(*REPORT.warnings, "beta is slow")))
    told = capsys.readouterr()

    assert (told.out + told.err).count("TCG may lose writes") == 1
    assert told.err.count("another") == 1
    assert told.out.count("warning: beta is slow") == 1
