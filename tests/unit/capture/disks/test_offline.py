"""Disks of a guest that is off: what is read of their images."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.nbd_peers import image, run, write
from tests.support.replicas import until
from vmckpt.capture.disks import offline
from vmckpt.capture.disks.offline import OffDisks
from vmckpt.capture.disks.plan import Parent
from vmckpt.capture.disks.reader import UNIT, State
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.hypervisor.backup import Backups
from vmckpt.model.disk import DiskFacts
from vmckpt.units import MIB, Bytes


def test_an_image_tells_of_its_size_version_and_bitmaps() -> None:
    disk = DiskFacts(name="vda", kind="file", device="disk", format="qcow2", source="/x")
    found = offline.read_info(
        disk,
        {
            "virtual-size": 8 * MIB,
            "format-specific": {
                "data": {
                    "compat": "1.1",
                    "bitmaps": [
                        {"name": "good", "flags": ["auto"]},
                        {"name": "torn", "flags": ["in-use", "auto"]},
                        {"name": "asleep", "flags": []},
                    ],
                }
            },
        },
    )
    assert (found.size, found.version) == (8 * MIB, 3)
    assert [one.whole for one in found.bitmaps] == [True, False, False]
    assert offline.read_info(disk, {"virtual-size": 1}).bitmaps == ()
    over = {"backing-filename": "b.img", "full-backing-filename": "/i/b.img", "virtual-size": 1}
    assert offline.read_info(disk, over).base is None, "QEMU would have to guess the format"
    over["backing-filename-format"] = "raw"
    assert offline.read_info(disk, over).base == ("/i/b.img", "raw")


class Disks:
    """A guest that is off, with these."""

    def __init__(self, *disks: DiskFacts) -> None:
        self._disks = disks

    def facts(self) -> tuple[DiskFacts, ...]:
        return self._disks


def off(folder: Path, *disks: DiskFacts) -> OffDisks:
    backups = cast("Backups", Disks(*disks))
    return OffDisks(backups, guest="u-1", host="alpha", snapshot="s-1", folder=folder)


def on(path: Path, name: str = "vda") -> DiskFacts:
    return DiskFacts(name=name, kind="file", device="disk", format="qcow2", source=str(path))


def test_each_disk_is_read_and_nothing_stays(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "1M", "write -P 7 64k 64k")
    empty = DiskFacts(name="sda", kind="file", device="cdrom", format="raw", source=None)
    with off(tmp_path, on(path), empty) as disks:
        undo = disks.prepare(None)
        disks.freeze_point()
        assert [one.name for one in disks.disks] == [one.name for one in disks.facts] == ["vda"]
        with disks.reader(disks.disks[0]) as reader:
            assert (reader.size, reader.incremental) == (1 << 20, False)
            assert bytes(reader.read(1, 1)) == b"\7" * UNIT
        assert [Path(name).exists() for name in undo.files] == [True]
        with pytest.raises(AssertionError, match="lock"):
            write(path, "write 0 512")
    assert disks.disks == ()
    assert [one.name for one in tmp_path.iterdir()] == ["a.qcow2"]
    write(path, "write 0 512")


def test_after_a_snapshot_only_what_its_bitmap_tells_is_read(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "1M", "write -P 1 0 1M")
    run("qemu-img", "bitmap", "--add", path, "vmckpt-s-0")
    write(path, "write -P 7 64k 64k")
    past = Parent(id="s-0", made_at=5, sizes={"vda": Bytes(1 << 20)})
    with off(tmp_path, on(path)) as disks:
        disks.prepare(past)
        disks.freeze_point()
        with disks.reader(disks.disks[0]) as reader:
            assert reader.incremental
            assert [(one.start, one.count) for one in reader.runs() if one.state is State.DATA] == [
                (1, 1)
            ]


def test_a_disk_that_somebody_writes_to_is_told(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "1M")
    words = ["qemu-nbd", "-f", "qcow2", "-t", "-k", str(tmp_path / "other"), str(path)]
    with subprocess.Popen(words) as other:
        try:
            until((tmp_path / "other").exists)
            with off(tmp_path, on(path)) as disks, pytest.raises(GuestLocked, match="is open in"):
                disks.prepare(None)
        finally:
            other.kill()


def test_a_disk_that_is_no_file_is_refused(tmp_path: Path) -> None:
    network = DiskFacts(name="vdb", kind="network", device="disk", format="raw", source="pool/x")
    with off(tmp_path, network) as disks, pytest.raises(BadInput, match="disk vdb has type"):
        disks.prepare(None)


_LATE = """
import socket, sys, time
served = socket.socket(socket.AF_UNIX)
served.bind(sys.argv[1])
time.sleep(0.5)
served.listen()
time.sleep(60)
"""


def test_a_disk_is_there_when_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qemu-nbd gives its socket a name before it listens, on a busy host long before."""
    image = tmp_path / "a.raw"
    image.write_bytes(b"x" * 65536)
    disk = DiskFacts(name="vda", kind="file", device="disk", format="raw", source=str(image))
    backups = cast("Backups", SimpleNamespace(facts=lambda: (disk,)))
    with OffDisks(backups, guest="u-1", host="alpha", snapshot="s-1", folder=tmp_path) as disks:
        place = str(disks._socket("vda"))
        monkeypatch.setattr(
            disks, "_serve", lambda *_: subprocess.Popen([sys.executable, "-c", _LATE, place])
        )
        disks.prepare(None)
        disks.freeze_point()
        with socket.socket(socket.AF_UNIX) as reader:
            reader.connect(place)
