"""A fleet as the exporter sees it, and what Prometheus reads of it."""

import urllib.request
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.tui.still import DRAIN, FLEET, MOVE, NOW, PART, PROTECT, SNAPSHOTS, entry, operation
from vmckpt.journal.evacuation_progress import turns
from vmckpt.journal.follow import Happening
from vmckpt.model.guest import SnapshotNow
from vmckpt.model.webhook import Address
from vmckpt.monitor.health import HealthSnapshot
from vmckpt.monitor.prometheus import Exporter, Served

Key = tuple[str, frozenset[tuple[str, str]]]
SILENT = SnapshotNow(id="", name="", store="far", wrong="no route to it")
NOW_STANDING = HealthSnapshot(
    fleet=FLEET, jobs=(MOVE, DRAIN, PROTECT), protections={"p-9abc": entry()},
    turns={"e-4b7x": turns(DRAIN.operation, (PART,), ())}, snapshots=(*SNAPSHOTS, SILENT),
    looked={"hosts": NOW},
)  # fmt: skip
REPORT: Mapping[str, Any] = {
    "downtime_ms": 120.0, "observed_downtime_ms": None, "iterations": 7, "bytes_transferred": 5000,
    "forecast": {"score": {
        "total": {"expected": [10.0, 20.0], "measured": 30.0, "covered": False, "width": 0.3},
        "downtime": {"expected": [0.1, 0.3], "measured": 0.12, "covered": True, "width": 0.5},
        "sent": None, "converged": True,
    }},
}  # fmt: skip


def scraped(exporter: Exporter) -> dict[Key, float]:
    """As Prometheus would read it, over HTTP."""
    served = Served(exporter, Address(host="127.0.0.1", port=0))
    try:
        with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=5) as said:
            text = said.read().decode()
    finally:
        served.close()
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def key(name: str, **labels: str) -> Key:
    return f"vmckpt_{name}", frozenset(labels.items())


def happened(event: str, values: Mapping[str, Any], kind: str = "migrate") -> Happening:
    return Happening(at=NOW, kind=event, operation=operation("m-1", kind), values=values)


def ended(outcome: str, kind: str = "migrate", **more: Any) -> Happening:
    told: dict[str, Any] = {"report": {}, "ended_at": NOW, **more}
    error = told["report"].get("error")
    one = operation("m-1", kind, outcome=outcome, **told)
    values = {"outcome": outcome, "error": error}
    return Happening(at=NOW, kind="ended", operation=one, values=values)
