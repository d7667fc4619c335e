"""vmckpt status and failover: what they tell, and which options go together."""

import json

import pytest
from typer.testing import CliRunner

from tests.support.protected_jobs import FULL, STANDS, agents, journal, protected
from tests.support.recorded_jobs import ran
from vmckpt.app import protection
from vmckpt.cli import protect
from vmckpt.cli.app import app
from vmckpt.errors import BadInput
from vmckpt.journal.store import Journal

__all__ = ["journal"]


def test_the_status_tells_what_output_waits_and_what_finds_changes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    agents(monkeypatch, lambda _: (FULL, STANDS))

    rows = {line[:15].strip(): line[15:].strip() for line in ran("status").splitlines()}

    assert rows["standby"] == "ready: it follows"
    assert rows["behind (RPO)"] == "120 ms, worst 500 ms"
    assert rows["output waits"] == "85 ms, worst 310 ms"
    assert rows["dirty tracking"] == "compare (it works everywhere)"
    (told,) = json.loads(ran("status", "--json"))
    assert told["standby"] == {"ready": True, "why": "it follows"}
    assert told["says"] == {"alpha": FULL, "beta": STANDS}


def test_the_status_of_a_guest_that_is_alone_says_why_and_nothing_about_a_lag(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    alone = {**FULL, "phase": "alone", "says": "no room is left", "packets_lost": 40}
    agents(monkeypatch, lambda _: (alone, STANDS))

    told = ran("status")

    assert "web1: alone, alpha → beta" in told
    assert "not ready: the guest is running unprotected, so its standby is outdated" in told
    assert "no room is left" in told
    assert "40 packets lost: QEMU's buffer was full" in told
    assert "behind (RPO)" not in told


def test_after_a_failover_the_status_says_what_happened_and_what_to_do(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    over = {**STANDS, "ready": False, "outcome": "failed-over", "why": "silent", "at": 1.7e9}
    agents(monkeypatch, lambda _: ({"error": "alpha: Connection refused"}, over))

    told = " ".join(ran("status").split())

    assert "web1: failed-over, alpha → beta" in told
    assert "failed over at 2023-11-1" in told
    assert "next run vmckpt recover; once alpha is up again, run vmckpt protect web1" in told
    assert "Connection refused" not in told
    assert "not ready" not in told
    (entry,) = json.loads(ran("status", "--json"))
    assert entry["end"].startswith("failed over at ")
    assert entry["next_step"].startswith("run vmckpt recover")


@pytest.mark.parametrize("other", ["--planned", "--host-is-off", "--end-test"])
def test_a_test_is_nothing_else_as_well(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("it was asked for")

    for name in ("test", "end_test", "failover"):
        monkeypatch.setattr(protection, name, never)
    result = CliRunner().invoke(protect.failover_app, ["web1", "--test", other])
    assert isinstance(result.exception, BadInput)
    assert "use one of them" in str(result.exception)


def test_it_goes_with_a_persons_word_alone() -> None:
    words = ["failover", "web1", "--lost-journal", "--inventory", "/nowhere"]
    result = CliRunner().invoke(app, words)
    assert "--lost-journal requires --host-is-off" in str(result.exception)
