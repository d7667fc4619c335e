"""Snapshots of guests that were not prepared, by write tracking."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.lab import protecting
from tests.lab.bench import WHOLE, Bench, finish, until, usable
from tests.lab.snapshots import gone, left, order, proofs, taken
from tests.support.paths import ROOT

GUEST: dict[str, Any] = {
    "memory": "256MiB", "dirty": "128MiB@2MiB/s", "disk": "32MiB", "disk_format": "qcow2",
}  # fmt: skip
INCREMENTAL = "reads what was written since the last snapshot"


def trackers(bench: Bench, on: str = "alpha") -> list[int]:
    """Process IDs of the trackers on a host."""
    told = bench.inside(
        on, "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), sys.executable, "-m",
        "tests.support.trackers",
    )  # fmt: skip
    return [int(one) for one in told.split()]


def test_the_second_snapshot_reads_what_was_written(kept: Bench) -> None:
    kept.guest(**GUEST)
    first = taken(kept).json
    assert first["way"] == "tracking", first
    assert first["way_reason"].startswith("reads all memory: "), first
    assert first["warnings"] == []
    assert len(trackers(kept)) == 1
    second = taken(kept).json
    assert (second["way_reason"], second["warnings"]) == (INCREMENTAL, [])
    assert second["read_bytes"] < first["read_bytes"] / 2
    assert second["same_bytes"] > 100 << 20
    assert {"stop", "device state", "changed pages", "cont"} <= set(second["phases_ms"])
    assert left(kept) == []
    kept.good("snapshot", "verify", second["id"], "--deep")
    kept.good("snapshot", "restore", second["id"], "--replace")
    assert proofs(kept) == []
    until(lambda: trackers(kept) == [])  # its QEMU has ended


def killed(bench: Bench) -> None:
    """Kill the guest's tracker."""
    (one,) = trackers(bench)
    bench.inside("alpha", "kill", "-9", str(one))
    until(lambda: trackers(bench) == [], limit=5)


def test_without_its_tracker_all_memory_is_read(kept: Bench) -> None:
    kept.guest(**GUEST)
    first = taken(kept).json
    killed(kept)
    again = taken(kept).json
    assert again["way_reason"] == "reads all memory: no process was tracking the guest's writes"
    assert again["read_bytes"] > 0.9 * first["read_bytes"]
    assert taken(kept).json["way_reason"] == INCREMENTAL
    ended = taken(kept, "--way", "background").json
    assert (ended["way"], ended["warnings"], trackers(kept)) == ("background", [], [])
    kept.inside("alpha", "virsh", "suspend", "web1")
    paused = taken(kept).json
    assert (paused["way"], paused["way_reason"]) == (
        "background", "no write tracking: the guest is not running",
    )  # fmt: skip
    kept.inside("alpha", "virsh", "resume", "web1")
    taken(kept)
    assert len(trackers(kept)) == 1
    assert kept.ledgers() == WHOLE
    usable(kept)


def test_protect_ends_the_tracker(kept: Bench) -> None:
    kept.guest(**GUEST)
    taken(kept)
    assert len(trackers(kept)) == 1
    try:
        protecting.protect(kept, automatic=False)
        assert trackers(kept) == []
    finally:
        kept.good("unprotect", "web1")
    assert taken(kept).json["way"] == "tracking"
    assert kept.ledgers() == WHOLE


@pytest.mark.parametrize("turns", [(9, 13), pytest.param(range(1, 26), marks=pytest.mark.long)])
def test_an_agent_that_is_killed_leaves_the_guest_running(
    bench: Bench, turns: Sequence[int]
) -> None:
    bench.guest(**GUEST)
    for number in turns:
        for kill in (f"{number}", f"{number}+"):
            order("tracked", f"kill={kill}", bench=bench)
            until(lambda: order("look", bench=bench)["state"] == "running", limit=15.0)
            left_over = order("protected", bench=bench)
            assert left_over == {"pages": 0, "descriptors": 0}, kill
            gone(bench)
    assert bench.ledgers() == WHOLE
    usable(bench)


def test_a_snapshot_that_was_interrupted_is_not_built_on(kept: Bench) -> None:
    kept.guest(**GUEST)
    taken(kept)
    killed(kept)  # so that the next one takes a while
    taking = kept.start("snapshot", "create", "web1")
    until(lambda: trackers(kept) != [])  # all is captured, and is being stored
    taking.kill()
    finish(taking)
    kept.good("recover")
    after = taken(kept).json
    assert after["way_reason"].startswith("reads all memory: the guest's last snapshot is"), after
    kept.good("snapshot", "restore", after["id"], "--replace")
    assert proofs(kept) == []
