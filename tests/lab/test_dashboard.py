"""The dashboard in a terminal, driven by keys alone, on real hosts.

With VMCKPT_PICTURES=FOLDER the screens are kept there, as scripts/picture takes them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import BUSY, SLOW, VMCKPT, WHOLE, Bench, until
from tests.lab.protecting import GUEST, lab_with_witness, protect, tidied
from tests.support.tmux import Tmux, terminal
from vmckpt.units import parse_rate
from vmckpt_lab import network

QUIET = {"memory": "160MiB", "dirty": "32MiB@6MiB/s"}


def keep(screen: Tmux, name: str) -> None:
    """For the docs."""
    if folder := os.environ.get("VMCKPT_PICTURES"):
        (Path(folder) / f"{name}.ansi").write_text(screen.screen(colours=True))


@pytest.mark.long
def test_a_migration_and_an_evacuation_by_keys_alone(bench: Bench, tmp_path: Path) -> None:
    bench.guest("web1", **QUIET)
    for name in ("alpha", "beta"):
        network.shape(bench.plan, name, SLOW)
    with terminal(tmp_path, [*VMCKPT, "dashboard"], bench.environment, (120, 50)) as screen:
        screen.until("2 hosts", "web1", "alpha")
        keep(screen, "fleet")
        screen.keys("m")
        # The plan is shown before the yes: preflight has passed, and the forecast is there.
        screen.until("Migrate web1", "$ vmckpt migrate web1 --to beta", "based on:", limit=90.0)
        keep(screen, "order")
        screen.keys("C-y")
        screen.until("web1: alpha → beta", "pre-copy", "bandwidth")
        screen.until("phase=pre-copy")
        keep(screen, "migration")
        screen.until("· completed", "downtime, observed", limit=90.0)
        assert bench.where() == ["beta"]
        screen.keys("Escape", "1")
        screen.until("1 guest")

        screen.keys("Tab", "Home", "Down", "e")
        screen.until("Evacuate beta", "1 move", limit=60.0)
        screen.keys("C-y")
        screen.until("evacuate on beta", "1 moving", "▶ pre-copy")
        keep(screen, "evacuation")
        screen.until("1 arrived", "100%", limit=120.0)
        assert bench.where() == ["alpha"]
        screen.keys("Escape")
        screen.until("it is in maintenance")
        # The guests have the keys now, and theirs is on a host that is open.
        screen.keys("1", "Tab", "Home", "Down", "C", "C-y")
        screen.gone("it is in maintenance")
    assert bench.ledgers() == WHOLE
    assert bench.good("maintenance", "list", "--json").json == []


@pytest.mark.long
def test_what_was_begun_outlives_the_dashboard_and_is_cancelled_from_the_next(
    bench: Bench, tmp_path: Path
) -> None:
    bench.guest("web1", **BUSY)
    for name in ("alpha", "beta"):
        network.shape(bench.plan, name, parse_rate("60mbit"))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    words = [*VMCKPT, "dashboard"]
    with terminal(tmp_path / "one", words, bench.environment, (80, 24)) as screen:
        screen.until("web1")
        screen.keys("m")
        # The question is in sight, however much there is to tell.
        screen.until("mode hybrid", "$ vmckpt migrate web1 --to beta", "Yes, migrate")
        screen.keys("C-y")
        screen.until("web1: alpha → beta", "pre-copy")
    (job,) = bench.good("jobs", "--json").json
    assert not job["unattended"]
    with terminal(tmp_path / "two", words, bench.environment, (80, 24)) as screen:
        screen.until("web1")
        screen.keys("2", "Enter")
        screen.until("web1: alpha → beta", "pre-copy")
        screen.keys("c")
        screen.until("will be discarded")
        screen.keys("Enter")  # that is "no"
        screen.gone("will be discarded")
        screen.keys("c")
        screen.until("will be discarded")
        screen.keys("C-y")
        screen.until("· cancelled")
    until(lambda: bench.where() == ["alpha"])
    assert bench.ledgers() == WHOLE


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"b{os.getpid()}") as made:
        yield made


@pytest.mark.long
def test_a_failover_by_keys_alone(witnessed: Bench, tmp_path: Path) -> None:
    with tidied(witnessed) as pair:
        pair.guest(**GUEST)
        protect(pair, automatic=False)
        words = [*VMCKPT, "dashboard"]
        with terminal(tmp_path, words, pair.environment, (120, 50)) as screen:
            screen.until("✓ ")
            screen.keys("3")
            screen.until("protecting")
            screen.keys("Enter")
            screen.until("epoch: ─ guest runs", "behind (RPO)")
            keep(screen, "protection")
            pair.good("lab", "kill", "alpha", "--name", pair.plan.name)
            screen.keys("f")
            screen.until("will resume on beta from its last epoch")
            keep(screen, "failover")
            # Nobody but a person can know that it is dead, and says so.
            screen.keys("Enter")
            screen.until("is off: I have verified this")
            screen.keys("Down", "Enter")
            screen.until("--host-is-off")
            screen.keys("C-y")
            screen.until("ended: ", limit=60.0)
            assert pair.where() == ["beta"]
        assert pair.ledgers()["memory"]
