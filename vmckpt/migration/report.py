"""The report of a plan and of a migration, for people and for scripts. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vmckpt.model.finding import Finding
from vmckpt.model.migration import (
    Decision,
    Driver,
    FailureSide,
    JobSample,
    JobTotals,
    Mode,
    Outcome,
)
from vmckpt.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over memory, as far as the samples show it."""

    number: int
    began: Seconds
    """Time since the migration began."""
    lasted: Seconds
    sent: Bytes
    remaining: Bytes
    """Smallest number of bytes left to send in this pass."""
    dirty_rate: BytesPerSecond | None
    bandwidth: BytesPerSecond
    """Mean bandwidth over the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """The result of a migration command."""

    guest: str
    source: str
    target: str
    outcome: Outcome
    driver: Driver | None
    """The process that drove the migration; None if no migration was started."""
    began: Seconds
    """When the migration began, by time.monotonic(); 0 if no migration was started."""
    elapsed: Seconds
    """Time from the order to migrate until the outcome was known, by the controller's clock."""
    totals: JobTotals | None
    """Final statistics, from libvirt or, in mode checkpoint, from the agents; None if there are
    none, or if the migration did not complete."""
    observed_downtime: Seconds | None
    """Blackout as clients saw it; None if it was not measured."""
    samples: tuple[JobSample, ...] = ()
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: str | None = None
    """Why the migration did not complete; usually libvirt's message."""
    refused: FailureSide | None = None
    """The side because of which libvirt refused the migration; None: it did not refuse."""
    policy: str | None = None
    mode: Mode | None = None
    """The chosen mode; None if the guest was not found."""
    switched: Seconds | None = None
    """When the switch to post-copy was ordered; None if it was not ordered."""
    switchover: Seconds | None = None
    """How long the guest was paused for post-copy, by libvirt's events; None if unknown. libvirt's
    statistics do not have it."""
    attempts: int = 1
    job: str | None = None
    """Job ID in the journal; None if there is no journal."""
    forecast: Mapping[str, Any] | None = None
    """The forecast with its score against the measured values, in JSON's types; None if there was
    no forecast."""
    limit: BytesPerSecond | None = None
    """Bandwidth limit at the start; None if there was none."""
    left_behind: tuple[str, ...] = ()
    """Images of copied disks that are still on the source of a completed migration."""
    removed: tuple[str, ...] = ()
    """Images that were removed from the source after the guest arrived."""
    stays: tuple[str, ...] = ()
    """Images that should have been removed but were not, with the reasons; also in `warnings`."""

    @property
    def iterations(self) -> int:
        if self.totals is not None:
            return self.totals.iterations
        return max((sample.iteration for sample in self.samples), default=0)

    @property
    def downtime(self) -> Seconds | None:
        """How long the guest was paused for the handover; None if unknown."""
        if self.totals is not None and self.totals.downtime is not None:
            return self.totals.downtime
        return self.switchover

    @property
    def transferred(self) -> Bytes:
        if self.totals is not None:
            return self.totals.transferred
        return max((sample.transferred for sample in self.samples), default=Bytes(0))

    @property
    def total(self) -> Seconds:
        return self.totals.total if self.totals is not None else self.elapsed


def passes(samples: Sequence[JobSample], began: Seconds) -> tuple[Pass, ...]:
    """Return one row per sampled pass. A pass shorter than the sampling interval may be missing.

    `began`: when the migration began, on the clock of the samples.
    """
    rows = []
    for number in sorted({sample.iteration for sample in samples if sample.iteration}):
        inside = [sample for sample in samples if sample.iteration == number]
        first = inside[0]
        # A pass ends where the next begins; the last one ends with its last sample.
        after = next((s for s in samples if s.iteration > number), inside[-1])
        moving = [sample.bandwidth for sample in inside if sample.bandwidth]
        rows.append(
            Pass(
                number=number,
                began=Seconds(first.at - began),
                lasted=Seconds(after.at - first.at),
                sent=Bytes(after.transferred - first.transferred),
                remaining=min(sample.remaining for sample in inside),
                dirty_rate=inside[-1].dirty_rate,
                bandwidth=BytesPerSecond(round(sum(moving) / len(moving)) if moving else 0),
            )
        )
    return tuple(rows)


def as_json(report: MigrationReport) -> dict[str, Any]:
    """Return the report as `--json` prints it: times in ms, sizes in bytes, rates in bytes/s."""
    totals = report.totals
    return {
        "guest": report.guest,
        "source": report.source,
        "target": report.target,
        "outcome": str(report.outcome),
        "job": report.job,
        "policy": report.policy,
        "mode": str(report.mode) if report.mode else None,
        "attempts": report.attempts,
        "switched_ms": None
        if report.switched is None
        else _ms(Seconds(report.switched - report.began)),
        "driver": str(report.driver) if report.driver else None,
        "total_ms": _ms(report.total),
        "setup_ms": _ms(totals.setup) if totals else None,
        "downtime_ms": _ms(report.downtime),
        "observed_downtime_ms": _ms(report.observed_downtime),
        "iterations": report.iterations,
        "bytes_transferred": report.transferred,
        "bandwidth_limit": report.limit,
        "samples": [sample_as_json(sample, report.began) for sample in report.samples],
        "passes": [_pass(row) for row in passes(report.samples, report.began)],
        "decisions": [decision_as_json(one, report.began) for one in report.decisions],
        "warnings": list(report.warnings),
        "findings": [finding.as_json() for finding in report.findings],
        "forecast": report.forecast,
        "dirty_probes": _probes(report.forecast),
        "left_behind": list(report.left_behind),
        "removed": list(report.removed),
        "error": report.error,
    }


def _probes(forecast: Mapping[str, Any] | None) -> list[Any]:
    """Return the measurements of the guest's writes, for use by the next forecast."""
    return [] if forecast is None else list(forecast["facts"]["dirty_probes"])


def _ms(time: Seconds | None) -> float | None:
    return None if time is None else round(time * 1000, 1)


def sample_as_json(sample: JobSample, began: Seconds) -> dict[str, Any]:
    """Return one sample as JSON, with its time since `began`."""
    return {
        "at_ms": _ms(Seconds(sample.at - began)),
        "phase": str(sample.phase),
        "iteration": sample.iteration,
        "remaining": sample.remaining,
        "total": sample.total,
        "transferred": sample.transferred,
        "bandwidth": sample.bandwidth,
        "dirty_rate": sample.dirty_rate,
        "expected_downtime_ms": _ms(sample.expected_downtime),
        "throttle": sample.throttle,
    }


def _pass(row: Pass) -> dict[str, Any]:
    fields = asdict(row)
    fields["began_ms"] = _ms(fields.pop("began"))
    fields["lasted_ms"] = _ms(fields.pop("lasted"))
    return fields


def decision_as_json(one: Decision, began: Seconds) -> dict[str, Any]:
    """Return one decision as JSON, with its time since `began`."""
    return {
        "at_ms": _ms(Seconds(one.at - began)),
        "action": one.action,
        "rule": one.rule,
        "acted": one.acted,
        "reason": one.reason,
        "numbers": dict(one.numbers),
    }
