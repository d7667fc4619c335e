"""What Prometheus and a webhook are told of real hosts."""

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.lab.bench import Bench, Told, finish, migrate, until
from vmckpt.monitor.webhooks import SIGNATURE, signature
from vmckpt_lab import lab
from vmckpt_lab.machine_speed import slowness

SMALL = {"memory": "128MiB", "dirty": "8MiB@1MiB/s", "disk": "16MiB"}
SECRET = b"of the lab"


class Pager:
    """A webhook's other end, and an Alertmanager."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []
        self.ends: dict[str, float] = {}
        """When each alert of the Alertmanager ends, in seconds since 1970, by its key."""
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/api/v2/alerts":
                    for one in json.loads(body):
                        ends = datetime.fromisoformat(one["endsAt"]).timestamp()
                        mine.ends[one["labels"]["key"]] = ends
                    self.send_response(200)
                    self.end_headers()
                    return
                good = self.headers[SIGNATURE] == signature(SECRET, body)
                if good:
                    mine.pages.append(json.loads(body))
                self.send_response(204 if good else 403)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def has(self, key: str, state: str) -> bool:
        return any((one["key"], one["state"]) == (key, state) for one in self.pages)

    def active(self, key: str) -> bool:
        return self.ends.get(key, 0.0) > time.time()


@pytest.fixture
def pager() -> Iterator[Pager]:
    found = Pager()
    yield found
    found.server.shutdown()
    found.server.server_close()


def scraped(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(url, timeout=10 * slowness()) as said:
        text = said.read().decode()
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text) for one in family.samples
    }  # fmt: skip


def has(url: str, name: str, value: float, **labels: str) -> bool:
    return scraped(url).get((f"vmckpt_{name}", frozenset(labels.items()))) == value


def migrated(bench: Bench, metrics: str) -> None:
    """Move web1 to beta; metrics and events tell it."""
    began = datetime.now(UTC).isoformat()
    # From before on, as it may take a while until it follows.
    events = Told(bench.start("events", "web1", "--follow", "--since", "10min", "--json"))
    done = migrate(bench)
    assert done.code == 0, done.err
    until(lambda: has(metrics, "operations_total", 1, kind="migrate", outcome="completed"))
    until(lambda: has(metrics, "host_guests", 1, host="beta", state="running"), limit=40)
    assert has(metrics, "migration_downtime_seconds_count", 1, seen_by="qemu")
    assert has(metrics, "migration_transferred_bytes_total", done.json["bytes_transferred"])
    while (events.next()["job"], events.all[-1]["event"]) != (done.json["job"], "ended"):
        pass
    events.process.send_signal(signal.SIGINT)
    rest = finish(events.process).out.splitlines()
    seen = [one for one in events.all + list(map(json.loads, rest)) if one["at"] > began]
    assert {one["job"] for one in seen} == {done.json["job"]}
    assert (seen[0]["event"], seen[-1]["event"]) == ("began", "ended")
    assert "phase-changed" in {one["event"] for one in seen}


@pytest.mark.long
def test_a_migration_a_dead_host_and_its_return_are_told(
    bench: Bench, pager: Pager, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    told = yaml.safe_load(bench.plan.inventory.read_text())
    url = f"http://127.0.0.1:{pager.server.server_address[1]}/"
    told["webhooks"] = [{"url": url, "secret_file": str(secret)}]
    told["alertmanagers"] = [{"url": url}]
    own = tmp_path / "hosts.yaml"
    own.write_text(yaml.safe_dump(told))
    bench.guest("web1", **SMALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = Told(bench.start("run", "--metrics", str(port), "--json", "--inventory", str(own)))
    try:
        service.until("started", 4)
        lines = " ".join(one["text"] for one in service.all)
        assert "alerts go to webhook 127.0.0.1" in lines
        assert "alerts go to Alertmanager 127.0.0.1" in lines
        metrics = f"http://127.0.0.1:{port}/metrics"
        assert metrics in lines
        until(lambda: has(metrics, "host_up", 1, host="beta"), limit=40)
        migrated(bench, metrics)
        bench.good("lab", "kill", "alpha", "--name", bench.plan.name)
        until(lambda: has(metrics, "host_up", 0, host="alpha"), limit=60)
        until(lambda: pager.has("host alpha", "firing"), limit=90)
        until(lambda: pager.active("host alpha"), limit=20)
        lab.heal(bench.plan, "alpha")
        until(lambda: pager.has("host alpha", "resolved"), limit=200)
        until(lambda: not pager.active("host alpha"), limit=20)
        mends = {one["key"]: one["mend"] for one in pager.pages}
        assert mends["host alpha"] == "run vmckpt doctor alpha"
    finally:
        service.process.send_signal(signal.SIGTERM)
        end = finish(service.process)
    assert end.code == 0, end.err
