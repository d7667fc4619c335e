"""The mirror into a write log, by a QEMU that has no guest and no libvirt."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.disk_logs import until
from tests.unit.guestless import Qmp, qemu
from vmckpt.checkpoint.nbdwire import Unix
from vmckpt.errors import HypervisorError
from vmckpt.replicate import logserver, mirroring, writelog
from vmckpt.replicate.diskepochs import LogPlace, WriteLog
from vmckpt.replicate.nbdwriter import NbdWriter
from vmckpt.units import MIB, Bytes

SIZE = 16 * MIB
LIMIT = 8 * MIB
JOB = mirroring.name_of(0)


@dataclass
class Rig:
    qmp: Qmp
    disk: Unix
    """The export of the mirrored node: who writes there is the guest."""
    image: Path
    place: LogPlace
    socket: logserver.Socket
    log: WriteLog

    def begin(self) -> None:
        mirroring.begin(self.qmp, node="disk", socket=self.socket.path, job=JOB)

    def anew(self, monkeypatch: pytest.MonkeyPatch, *, more: int) -> None:
        """Serve the log with so much room beyond its limit."""
        logserver.stop(self.place, self.socket)
        monkeypatch.setattr(logserver, "_MORE", more)
        logserver.start(self.place, self.socket, size=Bytes(SIZE), limit=Bytes(LIMIT))
        self.log.close()
        self.log = WriteLog(self.place)

    def nodes(self) -> set[str]:
        named = self.qmp.ask("query-named-block-nodes", flat=True)
        return {str(one["node-name"]) for one in named}

    def guest(self) -> NbdWriter:
        return NbdWriter(self.disk, "disk", host="here")

    def records(self) -> list[writelog.Record]:
        pieces = self.log.read(self.log.consumed, self.log.size())
        return [record for piece in pieces for record in writelog.records(piece)]

    def replay(self) -> bytearray:
        disk = bytearray(SIZE)
        for one in self.records():
            disk[one.offset : one.end] = bytes(one.length) if one.data is None else one.data
        return disk


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as undo:
        folder = Path(name)
        place = LogPlace(folder=folder / "log", disk=0)
        where = logserver.Socket(path=folder / "open" / "disk0.sock")
        logserver.start(place, where, size=Bytes(SIZE), limit=Bytes(LIMIT))
        undo.callback(logserver.stop, place, where)
        image = folder / "disk.raw"
        image.write_bytes(b"\1" * MIB + bytes(SIZE - MIB))
        node = f"driver=file,node-name=disk,filename={image},discard=unmap"
        qmp = undo.enter_context(qemu("-blockdev", node))
        address = {"type": "unix", "data": {"path": f"{folder}/guest.sock"}}
        qmp.tell("nbd-server-start", {"addr": address})
        export = {"type": "nbd", "id": "guest", "node-name": "disk", "writable": True}
        qmp.tell("block-export-add", export)
        disk = Unix(f"{folder}/guest.sock")
        made = Rig(qmp, disk, image, place, where, WriteLog(place))
        undo.callback(lambda: made.log.close())  # noqa: PLW0108 - it may be another by then
        yield made


def test_each_of_the_guests_writes_is_in_the_log_when_it_is_answered(rig: Rig) -> None:
    rig.begin()
    # Also before it says that it is ready.
    with rig.guest() as guest:
        for offset, data in [(4096, b"a" * 4096), (777, b"odd"), (2 * MIB, b"l" * (3 * MIB))]:
            guest.write(offset, data)
            guest.wait()
            assert rig.replay()[offset : offset + len(data)] == data
        guest.zeros(3 * MIB, MIB)
        guest.write(8 * MIB, bytes(MIB))
        guest.wait()
        assert [one.kind for one in rig.records()[-2:]] == [writelog.ZEROS, writelog.ZEROS]

    until(lambda: mirroring.begun(rig.qmp, JOB))
    assert rig.log.size() < 4 * MIB


def test_a_trim_leaves_source_and_log_alike(rig: Rig) -> None:
    rig.log.set_open(True)
    rig.begin()
    until(lambda: mirroring.begun(rig.qmp, JOB))
    with rig.guest() as guest:
        guest.write(0, b"x" * MIB)
        guest.trim(65536, 2 * MIB)
        guest.flush()

    assert rig.replay() == rig.image.read_bytes()


def test_stop_ends_while_writes_wait_for_room_if_it_is_told_so(rig: Rig) -> None:
    rig.begin()
    rig.qmp.tell("cont", {})
    with rig.guest() as guest:
        for number in range(12):
            guest.write(number * MIB, b"x" * MIB)
        until(lambda: rig.log.waited() > 0.02)
        held = rig.log.size()
        rig.log.set_open(True)
        rig.qmp.tell("stop", {})
        sealed = rig.log.size()
        rig.log.set_open(False)
        mirroring.begun(rig.qmp, JOB)
        guest.wait()

    assert LIMIT < held < sealed == rig.log.size()
    assert rig.replay()[: 12 * MIB] == b"x" * (12 * MIB)


def test_a_log_that_dies_harms_no_guest_and_is_seen_at_once(rig: Rig) -> None:
    rig.begin()
    process = logserver.running(rig.place)
    assert process is not None
    with rig.guest() as guest:
        guest.write(0, b"a" * 4096)
        guest.wait()
        mirroring.begun(rig.qmp, JOB)
        os.kill(process, signal.SIGKILL)
        guest.write(0, b"b" * 4096)
        guest.wait()
        # No later than that, or the epoch would be sealed without it.
        with pytest.raises(mirroring.MirrorEnded, match=r"here: writes do not come .* error"):
            mirroring.begun(rig.qmp, JOB)
        guest.write(4096, b"c" * 4096)
        guest.flush()
        rig.qmp.tell("stop", {})
    mirroring.end(rig.qmp, JOB)

    assert rig.image.read_bytes()[:8192] == b"b" * 4096 + b"c" * 4096
    assert rig.nodes() == {"disk"}


def test_a_log_without_any_room_is_seen_at_once_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.anew(monkeypatch, more=0)
    rig.begin()
    rig.log.set_open(True)
    with rig.guest() as guest:
        guest.write(0, b"x" * (LIMIT + MIB))
        guest.write(0, b"y" * MIB)
        guest.wait()
    with pytest.raises(mirroring.MirrorEnded, match="has ended: no space"):
        mirroring.begun(rig.qmp, JOB)

    assert rig.log.failed() == "No space left on device"
    assert rig.image.read_bytes()[:MIB] == b"y" * MIB


def test_beginning_and_ending_may_be_repeated_and_leave_nothing(rig: Rig) -> None:
    mirroring.end(rig.qmp, JOB)
    for _ in range(2):
        rig.begin()
        rig.begin()
        assert mirroring.left(rig.qmp) == (JOB,)
        assert rig.nodes() == {"disk", JOB, f"{JOB}-top"}
        mirroring.end(rig.qmp, JOB)
        mirroring.end(rig.qmp, JOB)
        assert (mirroring.left(rig.qmp), rig.nodes()) == ((), {"disk"})
        assert rig.qmp.ask("query-jobs") == []
    with pytest.raises(mirroring.MirrorEnded, match="somebody took it away"):
        mirroring.begun(rig.qmp, JOB)


def test_half_of_one_is_found_and_made_whole_or_taken_away(rig: Rig) -> None:
    server = {"type": "unix", "path": str(rig.socket.path)}
    half: dict[str, object] = {"driver": "nbd", "node-name": JOB, "server": server}
    rig.qmp.tell("blockdev-add", half)
    found = mirroring.left(rig.qmp)
    rig.begin()
    until(lambda: mirroring.begun(rig.qmp, JOB))
    mirroring.end(rig.qmp, JOB)
    rig.qmp.tell("blockdev-add", half)
    mirroring.end(rig.qmp, JOB)

    assert found == (JOB,)
    assert rig.nodes() == {"disk"}


def test_what_cannot_begin_leaves_nothing(rig: Rig) -> None:
    with pytest.raises(HypervisorError, match="nothere"):
        mirroring.begin(rig.qmp, node="nothere", socket=rig.socket.path, job=JOB)
    logserver.stop(rig.place, rig.socket)
    with pytest.raises(HypervisorError, match="Failed to connect"):
        rig.begin()

    assert rig.nodes() == {"disk"}


def test_a_mirror_ends_while_its_writes_wait(rig: Rig) -> None:
    rig.begin()
    with rig.guest() as guest:
        for number in range(12):
            guest.write(number * MIB, b"x" * MIB)
        until(lambda: rig.log.waited() > 0.02)
        rig.log.set_open(True)
        mirroring.end(rig.qmp, JOB)
        guest.flush()

    assert rig.image.read_bytes()[: 12 * MIB] == b"x" * (12 * MIB)
