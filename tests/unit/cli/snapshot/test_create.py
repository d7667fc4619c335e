"""What the snapshot bench makes of what it measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import snapshot_data
from bench.snapshot_feed import FileRegion, MadeRegion
from bench.snapshot_figures import rows
from bench.snapshot_peers import Failed, Restic, run
from vmckpt.store.format.chunk_map import UNIT, What


def turn(seconds: float, size: int) -> dict[str, Any]:
    part = {"seconds": seconds, "cpu": 2 * seconds, "bytes": size}
    return {"first": part, "second": part, "restore": part, "bytes": 2 * size}


def test_peers_are_compared_by_medians_and_the_smaller_store_counts() -> None:
    turns = {
        "vmckpt": [turn(1.0, 105), turn(9.0, 105), turn(1.0, 105)],
        "restic": [turn(1.4, 100)] * 3,
        "borg": [turn(2.0, 90)] * 3,
    }
    found = {one["what"]: one for one in rows({"peers": {"turns": turns}})}
    slower = found["first: borg takes so many times our seconds"]
    assert (slower["is"], slower["kept"]) == (2.0, True)
    assert not found["restore: restic takes so many times our cpu"]["kept"]
    size = found["size of first snapshot, of the better peer's"]
    assert (round(size["is"], 3), size["kept"]) == (1.167, False)


def test_a_part_that_failed_has_no_figures() -> None:
    failed = {"failed": "guest busy does not answer"}
    assert rows({"live": {"shared": failed, "idle": failed, "busy": failed}}) == []


def test_a_program_that_is_missing_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Failed, match=r"restic is not installed.*apt-get install restic"):
        Restic.version()


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
