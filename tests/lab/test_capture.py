"""Captures of real guests: what they keep, what they cost, what is left when they are killed."""

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.lab.bench import WHOLE, Bench, until, usable
from tests.lab.snapshots import FOLDER, gone, order
from vmckpt_lab.machine_speed import slowness

IDLE: dict[str, Any] = {"memory": "192MiB", "dirty": "32MiB@20MiB/s"}
ORDINARY = {"on": ["events"], "bandwidth": 128 << 20, "state": "running", "folder": False}


def disk_of(bench: Bench) -> str:
    return f"disk={bench.plan.shared}/web1.raw"


def test_a_guest_is_captured_while_it_runs_and_restored_as_it_was(bench: Bench) -> None:
    bench.guest(**IDLE)
    got = order("background", disk_of(bench), bench=bench)
    assert got["state"] == "running", got
    assert got["pages"] > 8192
    restored = order("restore", disk_of(bench), bench=bench)
    until(lambda: bench.seen(since=time.monotonic() - 0.5).blackout < 0.4)

    assert bench.ledgers() == WHOLE
    assert restored["took"] < 5.0 * slowness()
    gone(bench)


@pytest.mark.long
def test_a_capture_leaves_the_guest_as_it_was(bench: Bench) -> None:
    bench.guest(**IDLE)
    got = order("background", bench=bench)
    assert got["pause"] < 0.2 * slowness()
    gone(bench)
    for seconds in ("0", "0.05", "0.15"):
        stopped = order("background", f"stop={seconds}", bench=bench)
        assert stopped.get("error", "Cancelled") == "Cancelled", stopped
        gone(bench)

    assert order("look", bench=bench) == ORDINARY
    # Were its memory still write-protected, it would hang now.
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_paused_guest_stays_paused_and_can_still_be_saved(bench: Bench) -> None:
    bench.guest(**IDLE)
    bench.inside("alpha", "virsh", "suspend", "web1")
    got = order("background", bench=bench)

    assert got["state"] == "paused", got
    assert bench.inside("alpha", "virsh", "domstate", "web1").split() == ["paused"]
    gone(bench)
    bench.inside("alpha", "virsh", "save", "web1", "/var/tmp/web1.saved")
    bench.inside("alpha", "virsh", "restore", "/var/tmp/web1.saved", "--running")
    bench.inside("alpha", "rm", "/var/tmp/web1.saved")
    assert bench.ledgers() == WHOLE


@pytest.mark.long
def test_a_guest_that_was_stopped_for_it_goes_on(bench: Bench) -> None:
    bench.guest(**IDLE)
    bench.inside("alpha", "virsh", "suspend", "web1")
    got = order("background", "goes-on", bench=bench)

    assert got["state"] == "running", got
    assert bench.ledgers() == WHOLE
    gone(bench)


@pytest.mark.long
def test_shared_memory_is_captured_epoch_by_epoch(bench: Bench) -> None:
    bench.guest(**(IDLE | {"shared_memory": True}))
    got = order("shared", "epochs=4", bench=bench)
    assert (got["first"], got["epoch"], got["state"]) == (None, 4, "running"), got
    assert got["changed"][0] is None
    assert got["agrees"]
    again = order("shared", disk_of(bench), bench=bench)
    assert (again["first"], again["epoch"], again["agrees"]) == (4, 5, True), again
    assert again["changed"][0] > 0
    assert order("look", bench=bench) == ORDINARY | {"folder": True}

    order("restore", disk_of(bench), bench=bench)
    until(lambda: bench.seen(since=time.monotonic() - 0.5).blackout < 0.4)
    assert bench.ledgers() == WHOLE
    gone(bench)


@pytest.mark.long
def test_memory_that_is_not_shared_is_refused_with_the_reason(bench: Bench) -> None:
    bench.guest(**IDLE)
    got = order("shared", bench=bench)

    assert got["error"] == "CannotCapture"
    assert "is private to QEMU; use another method" in got["message"]
    assert order("look", bench=bench) == ORDINARY


@pytest.mark.long
def test_libvirts_own_snapshot_is_the_fallback(bench: Bench) -> None:
    bench.guest(**IDLE)
    got = order("fallback", bench=bench)
    assert got["state"] == "running", got
    assert got["pages"] > 8192
    gone(bench)

    assert order("look", bench=bench) == ORDINARY
    assert bench.ledgers() == WHOLE


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "every"),
    [("shared", 4), *(pytest.param(way, 1, marks=pytest.mark.campaign)
                      for way in ("background", "shared"))],
)  # fmt: skip
def test_killed_at_any_call_an_undo_makes_all_well(bench: Bench, way: str, every: int) -> None:
    bench.guest(**(IDLE | {"shared_memory": way == "shared"}))
    for number in range(1, 30, every):
        for kill in (f"{number}", f"{number}+"):
            if order(way, f"kill={kill}", "alone", bench=bench) is None:
                facts = bench.inside("alpha", "sh", "-c", f"cat {FOLDER}.undo 2>/dev/null || true")
                if facts:
                    order("undo", bench=bench)
            left = order("look", bench=bench)
            gone(bench)
            assert left | {"folder": False} == ORDINARY, (way, kill)
            assert bench.ledgers() == WHOLE, (way, kill)
    usable(bench)


@pytest.mark.parametrize(
    ("way", "kill"),
    [("background", "7"), ("background", "8+"),
     *(pytest.param(way, f"{n}+", marks=pytest.mark.long if n % 4 == 1 else pytest.mark.campaign)
       for way in ("background", "shared") for n in range(5, 16))],
)  # fmt: skip
def test_killed_at_any_call_the_keeper_makes_all_well(bench: Bench, way: str, kill: str) -> None:
    bench.guest(**(IDLE | {"shared_memory": way == "shared"}))
    order(way, f"kill={kill}", bench=bench)

    until(lambda: _as_before(bench), limit=15.0)
    assert bench.ledgers() == WHOLE
    gone(bench)


def _as_before(bench: Bench) -> bool:
    left = order("look", bench=bench)
    return bool(left | {"folder": False} == ORDINARY)


@pytest.mark.long
def test_after_a_kill_others_can_save_restore_and_migrate_it(bench: Bench) -> None:
    bench.guest(**IDLE)
    assert order("background", "kill=8+", bench=bench) is None
    until(lambda: _as_before(bench), limit=15.0)

    usable(bench)
    gone(bench)


@pytest.mark.long
def test_a_busy_guest_hardly_notices(bench: Bench) -> None:
    bench.guest(memory="512MiB", dirty="256MiB@80MiB/s")
    pauses, shares = [], []
    for _ in range(3):
        with Work(bench) as work:
            time.sleep(3.0)  # what it writes undisturbed is measured
            got = order("background", bench=bench)
            time.sleep(1.0)  # and what it writes until the end of the capture is seen
        gone(bench)
        pauses.append(got["pause"])
        began, ended = got["window"]
        shares.append(work.rate(began, ended) / work.rate(began - 3.0, began))

    sys.stderr.write(f"pauses {pauses}, share of the work {shares}\n")
    assert bench.ledgers() == WHOLE
    assert sorted(pauses)[1] <= 0.05 * slowness()
    assert sorted(shares)[1] >= 0.5


class Work:
    """How much a guest wrote, by the host's clock."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._over = threading.Event()
        self._seen: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Work":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.03):
            seen = self._bench.seen()
            self._seen.append((seen.now, seen.pages_written))

    def rate(self, began: float, ended: float) -> float:
        """Pages a second between two moments."""
        times, pages = zip(*self._seen, strict=True)
        written = np.interp([began, ended], times, pages)
        return float(written[1] - written[0]) / (ended - began)
