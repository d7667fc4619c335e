"""A real Prometheus scrapes what the service tells, and evaluates the rules that we ship."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.support.metrics import NOW_STANDING
from tests.support.paths import ROOT
from tests.tui.still import FLEET
from vmckpt.model.webhook import Address
from vmckpt.monitor.prometheus import Exporter, Served

_PROGRAM = ROOT / ".tools/usr/bin/prometheus"
_CONFIG = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: vmckpt
    static_configs: [{{targets: ['{target}']}}]
"""


@pytest.fixture
def exporter() -> Exporter:
    exporter = Exporter()
    # The clock of the rules is the real one.
    exporter.now = replace(NOW_STANDING, looked={"hosts": time.time() - 10_000})
    return exporter


@pytest.fixture
def prometheus(exporter: Exporter, tmp_path: Path) -> Iterator[str]:
    """The address of one that scrapes the exporter."""
    assert _PROGRAM.exists(), "./check --install fetches it"
    served = Served(exporter, Address(host="127.0.0.1", port=0))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    rules = ROOT / "packaging/prometheus/alerts.yaml"
    config.write_text(_CONFIG.format(rules=rules, target=served.address))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                _PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.kill()
        process.wait()
        served.close()


def asked(url: str) -> dict[str, Any]:
    """What it answers once there is something: it starts, scrapes and evaluates by itself."""
    until = time.monotonic() + 60
    while True:
        try:
            with urlopen(url, timeout=5) as said:
                data: dict[str, Any] = json.load(said)["data"]
            if data.get("result", True):
                return data
        except (URLError, OSError):
            pass
        assert time.monotonic() < until, url
        time.sleep(0.05)


def test_prometheus_reads_the_metrics_and_its_rules_fire(prometheus: str) -> None:
    series = asked(f"{prometheus}/query?query={quote('up == 1')}")["result"]
    assert len(series) == 1
    hosts = asked(f"{prometheus}/query?query=vmckpt_host_up")["result"]
    assert {one["metric"]["host"] for one in hosts} == {one.name for one in FLEET.hosts}

    firing = "ALERTS{alertname='VmckptBlind',alertstate='firing'}"
    fired = asked(f"{prometheus}/query?query=" + quote(firing))["result"]
    assert [one["metric"]["what"] for one in fired] == ["hosts"]
    alerts = asked(f"{prometheus}/alerts")["alerts"]
    told = {one["annotations"]["summary"] for one in alerts if one["state"] == "firing"}
    assert any(one.startswith("vmckpt run has not checked hosts for 2h") for one in told), told
    targets = asked(f"{prometheus}/targets?state=active")["activeTargets"]
    assert [(one["health"], one["lastError"]) for one in targets] == [("up", "")]
    rules = asked(f"{prometheus}/rules")["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}
