"""Count job events, and export the counts and the health gauges to Prometheus."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import vmckpt
from vmckpt.journal.follow import ENDED, Happening
from vmckpt.journal.records import WHOLE_HOST
from vmckpt.model.migration import Outcome
from vmckpt.model.webhook import Address
from vmckpt.monitor import health
from vmckpt.monitor.health import HealthSnapshot

_DOWNTIMES = (0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30)
_DURATIONS = (1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 7200)
_PASSES = (1, 2, 3, 5, 8, 13, 20, 30, 50)
_KINDS = ("migrate", "protect", "snapshot", "restore", *WHOLE_HOST)
_FORECAST = ("total", "downtime", "sent")
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Exporter(Collector):
    """The metrics at `/metrics`. Counters start at 0 when the process starts."""

    def __init__(self) -> None:
        self.now = HealthSnapshot()
        """The latest snapshot, which is replaced but never modified: other threads read it."""
        self.registry = mine = CollectorRegistry()
        Info("vmckpt_build", "The version.", registry=mine).info({"version": vmckpt.__version__})
        self._ended = Counter(
            "vmckpt_operations", "Operations that ended.", ["kind", "outcome"], registry=mine
        )
        self._decided = Counter(
            "vmckpt_decisions", "Decisions made in migrations.", ["action", "rule"],
            registry=mine,
        )  # fmt: skip
        self._took = Histogram(
            "vmckpt_operation_duration_seconds", "Duration of completed operations.",
            ["kind"], buckets=_DURATIONS, registry=mine,
        )  # fmt: skip
        self._downtime = Histogram(
            "vmckpt_migration_downtime_seconds",
            "Downtime of completed migrations, as QEMU reports it and as seen from outside.",
            ["seen_by"], buckets=_DOWNTIMES, registry=mine,
        )  # fmt: skip
        self._passes = Histogram(
            "vmckpt_migration_iterations", "Passes over memory in completed migrations.",
            buckets=_PASSES, registry=mine,
        )  # fmt: skip
        self._sent = Counter(
            "vmckpt_migration_transferred_bytes", "Bytes that migrations sent.", registry=mine
        )
        self._ratio = Histogram(
            "vmckpt_forecast_ratio", "Measured value divided by the middle of the forecast range.",
            ["of"], buckets=_RATIOS, registry=mine,
        )  # fmt: skip
        self._forecasts = Counter(
            "vmckpt_forecasts", "Forecasts that were compared with the measured values.",
            ["of", "covered"], registry=mine,
        )  # fmt: skip
        self._service = Counter(
            "vmckpt_service_events", "Events that the snapshot service reported.", ["event"],
            registry=mine,
        )  # fmt: skip
        # A series that begins at 1 shows no increase: the first lost guest would raise no alert.
        for kind in _KINDS:
            for outcome in Outcome:
                self._ended.labels(kind, str(outcome))
        for of in _FORECAST:
            for covered in ("true", "false"):
                self._forecasts.labels(of, covered)
        mine.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; see prometheus_client's Collector."""
        return health.families(self.now)

    def told(self, event: str) -> None:
        """Count an event of the service."""
        self._service.labels(event).inc()

    def take(self, one: Happening) -> None:
        """Count an event of a job, as read from the journal."""
        if one.kind == "decided" and one.operation.kind == "migrate":
            rule = str(one.values.get("rule") or "")
            self._decided.labels(str(one.values.get("action")), rule).inc()
        if one.kind != ENDED:
            return
        operation, outcome = one.operation, str(one.values["outcome"])
        self._ended.labels(operation.kind, outcome).inc()
        completed = outcome == Outcome.COMPLETED
        if completed:
            self._took.labels(operation.kind).observe(max(0.0, one.at - operation.began_at))
        if operation.kind == "migrate":
            self._move(operation.report or {}, completed=completed)

    def _move(self, report: Mapping[str, Any], *, completed: bool) -> None:
        self._sent.inc(report.get("bytes_transferred") or 0)
        if completed:
            for key, seen_by in (("downtime_ms", "qemu"), ("observed_downtime_ms", "outside")):
                if report.get(key) is not None:
                    self._downtime.labels(seen_by).observe(report[key] / 1000)
            if report.get("iterations"):
                self._passes.observe(report["iterations"])
        score = (report.get("forecast") or {}).get("score") or {}
        for of in _FORECAST:
            mark = score.get(of)
            if mark is None:
                continue
            self._forecasts.labels(of, str(bool(mark["covered"])).lower()).inc()
            middle = sum(mark["expected"]) / 2 if None not in mark["expected"] else 0.0
            if middle:
                self._ratio.labels(of).observe(mark["measured"] / middle)


class Served:
    """The HTTP endpoint for Prometheus, until `close`."""

    def __init__(self, exporter: Exporter, address: Address) -> None:
        """Start serving. Port 0: any free port. Raises OSError if the address cannot be bound."""
        self._host = address.host
        self._server, self._thread = start_http_server(
            address.port, address.host, exporter.registry
        )

    @property
    def address(self) -> str:
        """The host and port, as in a URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
