"""The mirror into a write log, by a QEMU that has no guest and no libvirt."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_logs import until
from tests.support.guest_disks import mirrors_left
from tests.support.guestless import Qmp, qemu
from vmckpt.capture import migration_settings
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import HypervisorError
from vmckpt.replication.backup.standby import NbdWriter
from vmckpt.replication.disks import mirror_job, nbdkit_server, write_log
from vmckpt.replication.disks.epoch_log import LogPlace, WriteLog
from vmckpt.units import MIB, Bytes

SIZE = 16 * MIB
LIMIT = 8 * MIB
JOB = mirror_job.name_of(0)


@dataclass
class Rig:
    qmp: Qmp
    disk: Unix
    """The export of the mirrored node: who writes there is the guest."""
    image: Path
    place: LogPlace
    socket: nbdkit_server.Socket
    log: WriteLog

    def begin(self) -> None:
        mirror_job.start_mirror(self.qmp, node="disk", socket=self.socket.path, job=JOB)

    def anew(self, monkeypatch: pytest.MonkeyPatch, *, more: int) -> None:
        """Serve the log with so much room beyond its limit."""
        nbdkit_server.stop(self.place, self.socket)
        monkeypatch.setattr(nbdkit_server, "_MORE", more)
        nbdkit_server.start(self.place, self.socket, size=Bytes(SIZE), limit=Bytes(LIMIT))
        self.log.close()
        self.log = WriteLog(self.place)

    def nodes(self) -> set[str]:
        named = self.qmp.ask("query-named-block-nodes", flat=True)
        return {str(one["node-name"]) for one in named}

    def guest(self) -> NbdWriter:
        return NbdWriter(self.disk, "disk", host="here")

    def records(self) -> list[write_log.Record]:
        pieces = self.log.read(self.log.consumed, self.log.size())
        return [record for piece in pieces for record in write_log.records(piece)]

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
        where = nbdkit_server.Socket(path=folder / "open" / "disk0.sock")
        nbdkit_server.start(place, where, size=Bytes(SIZE), limit=Bytes(LIMIT))
        undo.callback(nbdkit_server.stop, place, where)
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
        assert [one.kind for one in rig.records()[-2:]] == [write_log.ZEROS, write_log.ZEROS]

    until(lambda: mirror_job.begun(rig.qmp, JOB))
    assert rig.log.size() < 4 * MIB


def test_a_trim_leaves_source_and_log_alike(rig: Rig) -> None:
    rig.log.set_open(True)
    rig.begin()
    until(lambda: mirror_job.begun(rig.qmp, JOB))
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
        mirror_job.begun(rig.qmp, JOB)
        guest.wait()

    assert LIMIT < held < sealed == rig.log.size()
    assert rig.replay()[: 12 * MIB] == b"x" * (12 * MIB)


def test_a_log_that_dies_harms_no_guest_and_is_seen_at_once(rig: Rig) -> None:
    rig.begin()
    process = nbdkit_server.running(rig.place)
    assert process is not None
    with rig.guest() as guest:
        guest.write(0, b"a" * 4096)
        guest.wait()
        mirror_job.begun(rig.qmp, JOB)
        os.kill(process, signal.SIGKILL)
        guest.write(0, b"b" * 4096)
        guest.wait()
        # No later than that, or the epoch would be sealed without it.
        with pytest.raises(
            mirror_job.MirrorEnded, match=r"here: disk writes are no longer .* error"
        ):
            mirror_job.begun(rig.qmp, JOB)
        guest.write(4096, b"c" * 4096)
        guest.flush()
        rig.qmp.tell("stop", {})
    mirror_job.end(rig.qmp, JOB)

    assert rig.image.read_bytes()[:8192] == b"b" * 4096 + b"c" * 4096
    assert rig.nodes() == {"disk"}


def test_a_log_that_dies_is_seen_although_nothing_is_written(rig: Rig) -> None:
    """The job is well until the next write, but QEMU can save no device state any more."""
    rig.begin()
    rig.qmp.tell("block-export-del", {"id": "guest"})  # a migration takes no writer along
    assert rig.log.failed() is None
    assert saved(rig.qmp)["status"] == "completed"

    process = nbdkit_server.running(rig.place)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    until(lambda: rig.log.failed() == "its nbdkit process is gone")
    mirror_job.begun(rig.qmp, JOB)
    told = saved(rig.qmp)
    assert told["status"] == "failed"
    assert "flushing a disk or its mirror" in migration_settings.why_failed(told)


def saved(qmp: Qmp) -> dict[str, Any]:
    """Save the state of the paused machine; how that ended."""
    qmp.tell("stop", {})
    qmp.tell("migrate", {"uri": "exec:cat >/dev/null"})
    until(lambda: qmp.ask("query-migrate")["status"] in ("completed", "failed"))
    qmp.tell("cont", {})
    return dict(qmp.ask("query-migrate"))


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
    with pytest.raises(mirror_job.MirrorEnded, match="no longer works: no space"):
        mirror_job.begun(rig.qmp, JOB)

    assert rig.log.failed() == "No space left on device"
    assert rig.image.read_bytes()[:MIB] == b"y" * MIB


def test_beginning_and_ending_may_be_repeated_and_leave_nothing(rig: Rig) -> None:
    mirror_job.end(rig.qmp, JOB)
    for _ in range(2):
        rig.begin()
        rig.begin()
        assert mirrors_left(rig.qmp) == (JOB,)
        assert rig.nodes() == {"disk", JOB, f"{JOB}-top"}
        mirror_job.end(rig.qmp, JOB)
        mirror_job.end(rig.qmp, JOB)
        assert (mirrors_left(rig.qmp), rig.nodes()) == ((), {"disk"})
        assert rig.qmp.ask("query-jobs") == []
    with pytest.raises(mirror_job.MirrorEnded, match="it was removed"):
        mirror_job.begun(rig.qmp, JOB)


def test_half_of_one_is_found_and_made_whole_or_taken_away(rig: Rig) -> None:
    server = {"type": "unix", "path": str(rig.socket.path)}
    half: dict[str, object] = {"driver": "nbd", "node-name": JOB, "server": server}
    rig.qmp.tell("blockdev-add", half)
    found = mirrors_left(rig.qmp)
    rig.begin()
    until(lambda: mirror_job.begun(rig.qmp, JOB))
    mirror_job.end(rig.qmp, JOB)
    rig.qmp.tell("blockdev-add", half)
    mirror_job.end(rig.qmp, JOB)

    assert found == (JOB,)
    assert rig.nodes() == {"disk"}


def test_what_cannot_begin_leaves_nothing(rig: Rig) -> None:
    with pytest.raises(HypervisorError, match="nothere"):
        mirror_job.start_mirror(rig.qmp, node="nothere", socket=rig.socket.path, job=JOB)
    nbdkit_server.stop(rig.place, rig.socket)
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
        mirror_job.end(rig.qmp, JOB)
        guest.flush()

    assert rig.image.read_bytes()[: 12 * MIB] == b"x" * (12 * MIB)


class Monitor:
    """Says what it is told to say of the job, and takes down what is asked for."""

    guest, host, uri, name = "none", "here", "none", "web1"

    def __init__(self, *jobs: dict[str, Any] | None, state: str = "running") -> None:
        """`jobs`: one look after the other; the last one stays."""
        self._jobs, self._state = list(jobs), state
        self.did: list[str] = []

    def ask(self, command: str, **_: object) -> Any:
        if command != "query-block-jobs":
            return []
        found = self._jobs.pop(0) if len(self._jobs) > 1 else self._jobs[0]
        return [] if found is None else [{"device": JOB, "io-status": "ok", **found}]

    def tell(
        self, command: str, arguments: dict[str, object], *, files: tuple[int, ...] = ()
    ) -> Any:
        how = "" if "force" not in arguments else " by force" if arguments["force"] else " gently"
        self.did.append(command + how)

    def run_state(self) -> str:
        return self._state

    def paused_by_user(self) -> bool:
        return False


READY = {"status": "ready", "ready": True}
FORCED = ["stop", "block-job-cancel by force", "cont"]


@pytest.mark.parametrize(
    ("looks", "state", "did"),
    [
        pytest.param([READY, READY, None], "running", ["block-job-cancel gently"], id="works"),
        pytest.param(
            [{"status": "running", "ready": False}, READY, READY, None], "running",
            ["block-job-cancel gently"], id="is waited for until it is ready",
        ),
        pytest.param([READY | {"io-status": "failed"}, None], "running", FORCED, id="fails"),
        pytest.param(
            [READY | {"io-status": "failed"}, None], "paused", ["block-job-cancel by force"],
            id="the guest stands still",
        ),
        pytest.param(
            [READY, {"status": "concluded", "ready": True}, None], "running",
            ["block-job-cancel gently", "job-dismiss"], id="is dismissed",
        ),
        pytest.param([{"status": "aborting", "ready": True}, None], "running", [], id="ends"),
    ],
)  # fmt: skip
def test_nothing_is_broken_off_while_the_guest_writes(
    looks: list[dict[str, Any] | None], state: str, did: list[str]
) -> None:
    monitor = Monitor(*looks, state=state)
    mirror_job.end(monitor, JOB)

    assert monitor.did == did


def test_a_pause_to_break_one_off_is_told_while_it_lasts() -> None:
    """An agent that was killed in it left the guest paused for good."""
    monitor = Monitor(READY | {"io-status": "failed"}, None)
    mirror_job.end(monitor, JOB, lambda on: monitor.did.append(f"still {on}"))

    assert monitor.did == ["still True", *FORCED, "still False"]


def test_one_that_does_not_end_gently_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_job, "_GENTLY", 0.05)
    monkeypatch.setattr(mirror_job, "_PATIENCE", 0.2)
    monitor = Monitor(READY)
    with pytest.raises(HypervisorError, match="does not stop"):
        mirror_job.end(monitor, JOB)

    assert monitor.did[:4] == ["block-job-cancel gently", *FORCED]


@pytest.mark.long
def test_mirrors_that_end_while_the_guest_writes_leave_qemus_heap_alone(tmp_path: Path) -> None:
    """By valgrind: QEMU frees what writes under way still use if a mirror is broken off."""
    log, socket, guest = tmp_path / "valgrind", tmp_path / "log.sock", tmp_path / "guest.sock"
    (tmp_path / "disk.raw").write_bytes(bytes(64 * MIB))
    node = f"driver=file,node-name=disk,filename={tmp_path / 'disk.raw'}"
    with ExitStack() as undo:
        serves = ["nbdkit", "-f", "-U", str(socket), "memory", "64M"]
        undo.enter_context(running(serves))
        qmp = undo.enter_context(
            qemu("-blockdev", node, under=("valgrind", f"--log-file={log}"), limit=120.0)
        )
        address = {"type": "unix", "data": {"path": str(guest)}}
        qmp.tell("nbd-server-start", {"addr": address})
        export = {"type": "nbd", "id": "guest", "node-name": "disk", "writable": True}
        qmp.tell("block-export-add", export)
        # Each write has a block of its own: valgrind knows a freed one for a while.
        writes = ["qemu-img", "bench", "-w", "-d", "8", "-s", "4096", "-S", "69632", "-c",
                  "2000000000", "-f", "raw", f"nbd+unix:///disk?socket={guest}"]  # fmt: skip
        busy = undo.enter_context(running(writes))
        until(socket.exists)
        give_up = time.monotonic() + 40.0
        while time.monotonic() < give_up:
            mirror_job.start_mirror(qmp, node="disk", socket=socket, job=JOB)
            until(lambda: mirror_job.begun(qmp, JOB))
            time.sleep(0.3)
            mirror_job.end(qmp, JOB)
        assert busy.poll() is None
    told = log.read_text()

    assert "Memcheck" in told
    assert re.findall(r"inside a block of size [\d,]+ free'd", told) == []


@contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
