"""Past migrations, which are the input for the next forecast. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.journal.records import Operation
from vmckpt.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PastMove:
    """An ended migration, read from its report. None: the value is missing from the report."""

    id: str
    guest: str
    guest_uuid: str | None
    source: str | None
    target: str | None
    ended_at: float
    outcome: str
    mode: str | None
    total: Seconds | None
    setup: Seconds | None
    downtime: Seconds | None
    observed_downtime: Seconds | None
    transferred: Bytes | None
    bandwidth: BytesPerSecond | None
    """Mean bandwidth while memory was being sent."""
    dirty_rates: tuple[BytesPerSecond, ...]
    """Dirty rate of each pass in which it was measured."""
    dirty_probes: tuple[Mapping[str, Any], ...]
    """Dirty rate measurements before the migration, as in the report."""
    limit: BytesPerSecond | None
    """The migration's bandwidth limit; None: no limit is known."""


def past_move(operation: Operation) -> PastMove | None:
    """Build a PastMove from an operation; None if it has not ended or has no report."""
    report = operation.report
    if report is None or operation.ended_at is None:
        return None
    passes = report.get("passes") or ()
    transferred = report.get("bytes_transferred")
    rates = (row.get("dirty_rate") for row in passes)
    return PastMove(
        id=operation.id,
        guest=operation.guest,
        guest_uuid=operation.guest_uuid,
        source=operation.source,
        target=operation.target,
        ended_at=operation.ended_at,
        outcome=operation.outcome or "unknown",
        mode=report.get("mode") or operation.mode,
        total=_seconds(report, "total_ms"),
        setup=_seconds(report, "setup_ms"),
        downtime=_seconds(report, "downtime_ms"),
        observed_downtime=_seconds(report, "observed_downtime_ms"),
        transferred=None if transferred is None else Bytes(int(transferred)),
        bandwidth=_bandwidth(passes, report),
        dirty_rates=tuple(BytesPerSecond(int(rate)) for rate in rates if rate is not None),
        dirty_probes=tuple(report.get("dirty_probes") or ()),
        limit=_limit(operation, report),
    )


def _limit(operation: Operation, report: Mapping[str, Any]) -> BytesPerSecond | None:
    """Return the bandwidth limit from the report or, if it is missing, from the options.

    Older reports do not contain the limit.
    """
    asked = (operation.detail.get("wishes") or {}).get("bandwidth")
    found = report.get("bandwidth_limit") or asked
    return None if found is None else BytesPerSecond(int(found))


def _bandwidth(
    passes: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> BytesPerSecond | None:
    """Return the mean bandwidth of the passes, weighted by duration.

    If the passes have no bandwidth, returns the bytes sent divided by the total time.
    """
    moving = [(row["bandwidth"], row["lasted_ms"]) for row in passes if row.get("bandwidth")]
    time = sum(lasted for _, lasted in moving)
    if time > 0:
        return BytesPerSecond(round(sum(rate * lasted for rate, lasted in moving) / time))
    sent, total = report.get("bytes_transferred"), report.get("total_ms")
    return BytesPerSecond(round(sent / total * 1000)) if sent and total else None


def _seconds(report: Mapping[str, Any], key: str) -> Seconds | None:
    value = report.get(key)
    return None if value is None else Seconds(value / 1000)
