"""Single files out of a disk that nobody mounts."""

from pathlib import Path

import pytest

from tests.support.partitioned import MIB, with_files
from tests.support.stocking import page
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput
from vmckpt.snapshot import files as snapshot_files
from vmckpt.snapshot.partitions import Part


def test_a_part_is_chosen_or_all_are_named() -> None:
    one, two, xfs = Part(1, 0, MIB, "ext4"), Part(2, MIB, MIB, "ext4"), Part(3, 0, MIB, "xfs")
    assert snapshot_files.chosen("vda", [xfs, one], None) == one
    assert snapshot_files.chosen("vda", [one, two], 2) == two
    for parts, number, why in (
        ([one, two], None, "several file systems: partition 1 .*--disk vda:1"),
        ([one], 7, "no partition 7; choose one of partition 1"),
        ([one, xfs], 3, "only ext2, ext3 and ext4"),
        ([Part(0, 0, MIB, "")], None, "unknown content"),
    ):
        with pytest.raises(BadInput, match=why):
            snapshot_files.chosen("vda", parts, number)


@pytest.fixture
def filled(tmp_path: Path) -> Export:
    """A disk whose second partition has some files."""
    tree = tmp_path / "tree"
    (tree / "etc/deep").mkdir(parents=True)
    (tree / "etc/fstab").write_text("UUID=1 / ext4\n")
    (tree / "etc/deep/a b").write_bytes(page(1, 300_000))
    (tree / "etc/link").symlink_to("/etc/passwd")
    data = with_files(tree, tmp_path / "disk.raw")
    return Export(size=len(data), read=lambda at, length: data[at : at + length])


def test_single_files_come_out_of_a_disk(filled: Export, tmp_path: Path) -> None:
    with snapshot_files.opened(filled, "vda", None) as files:
        names = {one.name: one for one in files.list("/etc")}
        assert set(names) == {"deep", "fstab", "link"}
        assert (names["fstab"].size, names["deep"].folder) == (14, True)
        assert [one.name for one in files.list("/etc/fstab")] == ["fstab"]
        assert files.read("/etc/fstab") == b"UUID=1 / ext4\n"
        place, left_out = files.get("/etc", tmp_path / "copy")
        for path, why in (
            ("/none", "File not found"), ("/etc/link", "symlink to /etc/passwd"),
            ('/a"b', "does not support this file name"), ("/etc/deep", "is a directory"),
        ):  # fmt: skip
            with pytest.raises(BadInput, match=why):
                files.read(path)
        with pytest.raises(BadInput, match="already exists"):
            files.get("/etc/fstab", place / "fstab")
    assert left_out == 1
    assert (place / "deep/a b").read_bytes() == page(1, 300_000)
    assert {path.name for path in place.iterdir()} == {"deep", "fstab"}
    assert "vmckpt-" not in Path("/proc/self/mounts").read_text()
