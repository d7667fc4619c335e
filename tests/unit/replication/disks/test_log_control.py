"""The numbers that a disk's nbdkit and the agent share."""

from pathlib import Path

import pytest

from vmckpt.replication.disks.log_control import SIZE, Control


def test_both_ends_see_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "control"
    Control.create(path)
    with Control(path) as ours, Control(path) as theirs:
        before = [
            ours.consumed,
            ours.written,
            ours.failed,
            ours.waited,
            ours.process,
            ours.never_wait,
        ]
        ours.consumed, ours.never_wait = 1 << 40, True
        theirs.written, theirs.failed, theirs.waited, theirs.process = (1 << 63) + 5, 28, 7, 99

        assert before == [0, 0, 0, 0, 0, False]
        assert (theirs.consumed, theirs.never_wait) == (1 << 40, True)
        assert (ours.written, ours.failed, ours.waited, ours.process) == ((1 << 63) + 5, 28, 7, 99)
    assert path.stat().st_size == SIZE
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [bytes(SIZE), b"", b"x" * 100], ids=["zeros", "empty", "short"])
def test_another_file_is_no_control_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "control"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"control file|mmap|empty"):
        Control(path)
