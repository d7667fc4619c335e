"""A guest's disks read through its own QEMU, by one that has no guest and no libvirt."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.guest_disks import with_disks
from tests.support.guestless import Qmp
from tests.support.staging import in_memory
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import HypervisorError
from vmckpt.replication.backup.standby import NbdWriter
from vmckpt.replication.disks import resync
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.units import MIB

OWNER = (os.getuid(), os.getgid())


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as made:
        yield made


@pytest.fixture
def qemu(folder: Path) -> Iterator[Qmp]:
    with with_disks(folder, "a", "b") as made:
        yield made


def serves(qemu: Qmp) -> bool:
    """Whether it has an NBD server: it would not get another one."""
    try:
        qemu.tell("nbd-server-start", {"addr": {"type": "unix", "data": {"path": "/dev/null/x"}}})
    except HypervisorError as exc:
        return "already running" in exc.message
    raise AssertionError("it serves in a place where nobody can")


def test_disks_are_read_in_their_order_and_nothing_stays(qemu: Qmp, folder: Path) -> None:
    place = resync.place_of(folder)
    with resync.opened(qemu, ["b", "a"], place, OWNER) as disks:
        assert [disk.read(0, 2) for disk in disks] == [b"bb", b"aa"]
        assert [disk.size for disk in disks] == [2 * MIB, 2 * MIB]
        (hole,) = disks[0].read_many([(MIB, MIB)])
        assert not any(hole.content())
        assert all(disk.read_only for disk in disks)
        assert oct(place.stat().st_mode & 0o777) == "0o700"
    assert not serves(qemu)
    assert qemu.ask("query-block-exports") == []
    assert not place.exists()


def test_nobody_can_write_to_them_that_way(qemu: Qmp, folder: Path) -> None:
    place = resync.place_of(folder)
    with (
        resync.opened(qemu, ["a"], place, OWNER),
        pytest.raises(HypervisorError, match="it is read-only"),
    ):
        NbdWriter(Unix(str(place / "disks.sock")), "vmckpt-read-0", host="here")


def test_what_an_agent_left_that_died_is_taken_away(qemu: Qmp, folder: Path) -> None:
    place = resync.place_of(folder)
    opened = resync.opened(qemu, ["a", "b"], place, OWNER)
    opened.__enter__()
    assert serves(qemu)
    with resync.opened(qemu, ["a"], place, OWNER) as disks:
        assert disks[0].read(0, 1) == b"a"
    resync.end(qemu, place)
    assert not serves(qemu)
    assert not place.exists()


def test_a_server_of_somebody_else_is_left_alone(qemu: Qmp, folder: Path) -> None:
    place = resync.place_of(folder)
    address = {"type": "unix", "data": {"path": f"{folder}/theirs"}}
    qemu.tell("nbd-server-start", {"addr": address})
    with (
        pytest.raises(
            ConnectionLost, match="guestless's disks cannot be read: NBD server already running"
        ),
        resync.opened(qemu, ["a"], place, OWNER),
    ):
        raise AssertionError
    assert serves(qemu)
    assert not place.exists()


def test_where_a_disk_cannot_be_served_nothing_stays(qemu: Qmp, folder: Path) -> None:
    place = resync.place_of(folder)
    with pytest.raises(HypervisorError), resync.opened(qemu, ["a", "none"], place, OWNER):
        raise AssertionError
    assert not serves(qemu)
    assert not place.exists()
