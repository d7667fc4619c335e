"""The line state: kept whole, or not at all."""

import os
import signal
from pathlib import Path

import numpy as np

from vmckpt.agent.snapshot import parent_state as snapshot_parent_state
from vmckpt.store import parent_state
from vmckpt.store.format.chunk_map import Kind

CHUNKS = [bytes([n]) * 32 for n in range(3)]


def kept(folder: Path, snapshot: str = "s-1") -> None:
    with parent_state.Draft(folder) as draft:
        prints = draft.prints("pc.ram", Kind.RAM, 4096 * 10)
        prints[3] = np.void(b"p" * 16)
        maps = {"pc.ram": np.arange(10, dtype=np.uint32), "vda": np.arange(2, dtype=np.uint32)}
        draft.keep(snapshot, CHUNKS, maps, {"checkpoint": "c1"})


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    kept(tmp_path / "web1", "s-0")
    kept(tmp_path / "web1")
    found = parent_state.load(tmp_path / "web1")
    assert found is not None
    assert (found.snapshot, list(found.chunks)) == ("s-1", CHUNKS)
    assert found.extra == {"checkpoint": "c1"}
    assert found.regions["pc.ram"].map.tolist() == list(range(10))
    prints = found.regions["pc.ram"].prints
    assert prints is not None
    assert [bytes(one) for one in prints[2:4]] == [bytes(16), b"p" * 16]
    assert found.regions["vda"].prints is None
    assert [path.name for path in tmp_path.iterdir()] == ["web1"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "web1").iterdir()} == {0o600}


def test_nothing_is_left_of_one_that_was_given_up(tmp_path: Path) -> None:
    with parent_state.Draft(tmp_path / "web1") as draft:
        draft.prints("pc.ram", Kind.RAM, 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_one_flipped_bit_anywhere_and_it_is_none(tmp_path: Path) -> None:
    kept(tmp_path / "web1")
    for path in sorted((tmp_path / "web1").iterdir()):
        good = path.read_bytes()
        for at in range(0, len(good), 1 if path.name != "line.json" else 7):
            bad = bytearray(good)
            bad[at] ^= 4
            path.write_bytes(bad)
            assert parent_state.load(tmp_path / "web1") is None
        path.write_bytes(good)
    assert parent_state.load(tmp_path / "web1") is not None


def test_what_nobody_uses_is_swept(tmp_path: Path) -> None:
    kept(tmp_path / "web1")
    (tmp_path / "web2.x").mkdir()
    now = (tmp_path / "web1").stat().st_mtime
    for days, left in ((0.9, ["web1", "web2.x"]), (1.1, ["web1"]), (99, ["web1"]), (101, [])):
        parent_state.sweep(tmp_path, now=now + days * 86_400)
        assert sorted(one.name for one in tmp_path.iterdir()) == left


def test_drafts_of_those_that_were_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "lines" / "web1-n"
    kept(folder.parent / "web1-nearer")
    with parent_state.Draft(folder.parent / "web2-n") as at_work:
        at_work.prints("pc.ram", Kind.RAM, 4096)
        process = os.fork()
        if not process:
            with parent_state.Draft(folder) as draft:
                draft.prints("pc.ram", Kind.RAM, 4096)
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(process, 0)
        drafts = sorted(folder.parent.glob(".*"))
        assert len(drafts) == 2
        for one in drafts:
            os.utime(one, (1.0, 1.0))
        parent_state.clear(folder.parent)
        assert [one.name[:8] for one in folder.parent.glob(".*")] == [".web2-n."]
    assert [one.name for one in folder.parent.iterdir()] == ["web1-nearer"]


def test_a_whole_draft_of_one_that_was_killed_is_no_line(tmp_path: Path) -> None:
    """Else its bitmap would be kept for ever."""
    kept(tmp_path / "g-near")
    kept(tmp_path / ".g-far.abcdefgh", "s-9")
    assert snapshot_parent_state.others(tmp_path / "g-x", "g") == ["c1"]
