"""What the snapshot bench makes of what it measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import peers, snapshot_data, stores
from bench.peers import Failed, run
from bench.snapshot_feed import FileRegion, MadeRegion
from vmckpt.store.format.chunk_map import UNIT, What


def turn(seconds: float, size: int) -> dict[str, Any]:
    part = {"seconds": seconds, "cpu": 2 * seconds}
    return {"first": part, "second": part, "restore": part, "bytes": size << 20}


def test_peers_are_compared_by_medians_and_the_best_of_them_counts() -> None:
    turns = {
        "vmckpt": [turn(1.0, 105), turn(9.0, 105), turn(1.0, 105)],
        "restic": [turn(1.4, 100)] * 3,
        "borg zstd": [turn(2.0, 90)] * 3,
    }
    told = {
        "sealing": 5e8, "memory_copy": 8e9, "disk_write": 1e9, "peak_mib": {256: 200.0},
        "compare": {"compare": {"gib_s": 3.0}, "read": {"gib_s": 4.0}},
    }  # fmt: skip
    found = {one.what: one for one in stores.figures(turns, 4e8, told)}
    took = found["first snapshot"]
    assert (took.ours, took.limit, took.peer, took.peer_is) == (1.0, 0.4, 1.4, "restic")
    speed = found["restore, per core"]
    assert (speed.ours, speed.limit, speed.peer_is) == (200.0, 8000.0, "restic")
    assert speed.peer == pytest.approx(4e8 / 1e6 / 2.8)
    size = found["size of both snapshots"]
    assert (size.ours, size.peer, size.peer_is) == (105, 90, "borg zstd")


def test_programs_that_are_missing_are_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    with pytest.raises(Failed, match=r"not installed; run scripts/peers"):
        peers.versions()


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(Failed, match="exited with 3: oh dear"):
        run(["sh", "-c", "echo oh dear >&2; exit 3"], Path("/"), {}, None)


def test_a_sparse_copy_is_the_same_file(tmp_path: Path) -> None:
    one, other = tmp_path / "disk-1", tmp_path / "disk-2"
    one.write_bytes(bytes(3 << 20) + b"x" * 5000 + bytes(2 << 20))
    snapshot_data.copy(one, other)
    assert snapshot_data.same(one, other)
    with FileRegion(other) as region:
        data = [e for e in region.extents() if e.what is What.DATA]
        assert sum(e.count for e in data) * UNIT[region.kind] < 3 << 20
        assert data[0].start * UNIT[region.kind] <= 3 << 20
    snapshot_data.change(other, 3 << 20, 0.1, 1)
    assert not snapshot_data.same(one, other)


@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_no_two_made_pages_are_equal(kind: str) -> None:
    region = MadeRegion(4 << 20, kind)
    pages = np.frombuffer(region.read(0, 1024), dtype=np.uint8).reshape(-1, 4096)
    filled = pages[pages.any(axis=1)]
    assert len({one.tobytes() for one in filled}) == len(filled)
    assert region.read(100, 4) == region.read(96, 8)[4 * 4096 :]
