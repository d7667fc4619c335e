"""Disks as they were at one instant, in a QEMU that waits as a standby does."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.support.guestless import Qmp
from vmckpt.capture.nbd.client import Client
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.replication.backup.standby import NbdWriter
from vmckpt.replication.test_failover import disk_copy
from vmckpt.replication.test_failover.disk_copy import Fleece
from vmckpt.units import MIB

SIZE = 8 * MIB
FORMATS = ("raw", "qcow2")


@dataclass
class Rig:
    """Two disks, of either format, as `Standby` exports them."""

    qmp: Qmp
    place: Unix
    fleeces: tuple[Fleece, ...]
    disks: list[NbdWriter]
    content: list[bytearray]

    def write(self, dice: Random, count: int = 50) -> None:
        """As epochs are applied."""
        for _ in range(count):
            disk = dice.randrange(2)
            offset = dice.randrange(SIZE - 70_000)
            data = dice.randbytes(dice.randrange(1, 70_000))
            if dice.random() < 0.2:
                data = bytes(len(data))
                self.disks[disk].zeros(offset, len(data))
            else:
                self.disks[disk].write(offset, data)
            self.content[disk][offset : offset + len(data)] = data
        for one in self.disks:
            one.flush()

    def read(self, export: str) -> bytes:
        with reading(self.place, export) as disk:
            return disk.read(0, SIZE)

    def now(self) -> list[bytes]:
        return [bytes(one) for one in self.content]

    def left(self) -> list[str]:
        """All in QEMU that is a test's."""
        found = [one["device"] for one in self.qmp.ask("query-block-jobs")]
        found += [one["id"] for one in self.qmp.ask("query-block-exports")]
        found += [one["node-name"] for one in self.qmp.ask("query-named-block-nodes", flat=True)]
        return [one for one in found if "test" in one]


def reading(place: Unix, export: str) -> Client:
    return Client(place, export, host="here")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as undo:
        folder = Path(name)
        ours, theirs = socket.socketpair()
        qmp = Qmp(ours)
        undo.callback(qmp.close)
        words = [
            "qemu-system-x86_64", "-machine", "pc", "-m", "16", "-accel", "tcg", "-nodefaults",
            "-display", "none", "-mon", "chardev=qmp,mode=control",
            "-chardev", f"socket,id=qmp,fd={theirs.fileno()}", "-incoming", "defer",
        ]  # fmt: skip
        for number, kind in enumerate(FORMATS):
            image = folder / f"disk{number}"
            create(image, kind)
            words += ["-blockdev", f"driver=file,node-name=file{number},filename={image}"]
            words += ["-blockdev", f"driver={kind},node-name=disk{number},file=file{number}"]
            words += ["-device", f"virtio-blk-pci,drive=disk{number}"]
        with theirs:
            qemu = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        undo.callback(qemu.wait)
        undo.callback(qemu.kill)
        qmp.tell("qmp_capabilities", {})
        place = Unix(f"{folder}/disks.sock")
        address = {"type": "unix", "data": {"path": f"{folder}/disks.sock"}}
        qmp.tell("nbd-server-start", {"addr": address})
        disks, fleeces = [], []
        for number in range(2):
            export: dict[str, object] = {"type": "nbd", "id": f"ours{number}", "writable": True}
            qmp.tell("block-export-add", export | {"node-name": f"disk{number}"})
            writer = NbdWriter(place, f"disk{number}", host="here")
            disks.append(undo.enter_context(writer))
            image = folder / f"old{number}"
            create(image, "qcow2")
            fleeces.append(
                Fleece(number=number, export=f"vd{number}", node=f"disk{number}", image=str(image))
            )
        content = [bytearray(SIZE), bytearray(SIZE)]
        yield Rig(qmp, place, tuple(fleeces), disks, content)
        assert qemu.poll() is None  # whatever was done to it, the standby is there


def create(image: Path, kind: str) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, image, str(SIZE)], check=True)


def test_what_is_read_is_what_was_then_whatever_is_written_later(rig: Rig) -> None:
    dice = Random(7)
    rig.write(dice)
    disk_copy.prepare(rig.qmp, rig.fleeces)
    rig.write(dice)
    disk_copy.start_copies(rig.qmp, rig.fleeces)
    then = rig.now()
    for _ in range(3):
        rig.write(dice)
        assert [rig.read("vd0"), rig.read("vd1")] == then
    # And the standby's own are what was written.
    assert [rig.read("disk0"), rig.read("disk1")] == rig.now() != then


def test_nothing_is_left_of_it_and_it_can_be_done_again(rig: Rig) -> None:
    dice = Random(8)
    for _ in range(3):
        disk_copy.prepare(rig.qmp, rig.fleeces)
        disk_copy.start_copies(rig.qmp, rig.fleeces)
        rig.write(dice)
        assert rig.left()
        assert disk_copy.end(rig.qmp)
        assert rig.left() == []
        assert not disk_copy.end(rig.qmp)
        rig.write(dice)
        for number in range(2):
            create(Path(rig.fleeces[number].image), "qcow2")
    assert [rig.read("disk0"), rig.read("disk1")] == rig.now()


def test_half_of_it_is_taken_away_too(rig: Rig) -> None:
    disk_copy.prepare(rig.qmp, rig.fleeces[:1])
    with pytest.raises(QmpRefused):
        disk_copy.start_copies(rig.qmp, rig.fleeces)  # all of them or none
    assert rig.qmp.ask("query-block-jobs") == []
    assert disk_copy.end(rig.qmp)
    assert rig.left() == []


def test_it_ends_while_somebody_reads(rig: Rig) -> None:
    disk_copy.prepare(rig.qmp, rig.fleeces)
    disk_copy.start_copies(rig.qmp, rig.fleeces)
    with reading(rig.place, "vd0") as reader:
        reader.read(0, 4096)
        disk_copy.end(rig.qmp)
        assert rig.left() == []
        with pytest.raises(HypervisorError):
            reader.read(0, 4096)


def test_the_standby_s_server_ends_at_once_beside_it(rig: Rig) -> None:
    """As in a failover, which does not wait for the end of a test."""
    disk_copy.prepare(rig.qmp, rig.fleeces)
    disk_copy.start_copies(rig.qmp, rig.fleeces)
    rig.write(Random(9))
    with reading(rig.place, "vd0") as reader:
        reader.read(0, 4096)
        for one in rig.disks:
            one.close()
        began = time.monotonic()
        rig.qmp.tell("nbd-server-stop", {})
        assert time.monotonic() - began < 1.0
    disk_copy.end(rig.qmp)
    assert rig.left() == []
