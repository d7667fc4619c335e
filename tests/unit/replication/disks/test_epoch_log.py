"""A disk's write log with a real nbdkit: what the guest waits for, and what its reader gets."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.disk_logs import CONTENT, LIMIT, SIZE, Served, records, room, serving, until
from vmckpt.errors import HypervisorError
from vmckpt.replication.disks import nbdkit_server, write_log
from vmckpt.replication.disks.epoch_log import DiskLogError, LogPlace, WriteLog
from vmckpt.replication.disks.log_control import Control
from vmckpt.replication.disks.write_log import DATA, TRIM, ZEROS
from vmckpt.units import MIB


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def test_each_write_is_in_the_log_when_it_is_answered(served: Served) -> None:
    log = served.log()
    with served.guest() as guest:
        changes: list[Callable[[], None]] = [
            lambda: guest.write(4096, b"\7" * 4096),
            lambda: guest.zeros(8192, 40 * MIB),
            lambda: guest.trim(0, MIB),
            lambda: guest.write(777, b"odd"),
            lambda: guest.write(SIZE - 512, b"e" * 512),
        ]
        for change in changes:
            before = log.size()
            change()
            guest.wait()
            assert log.size() > before
        guest.flush()
        assert guest.size == SIZE
        assert guest.read(0, 8192) == bytes(8192)

    told = [(r.offset, r.length, r.kind, r.data and bytes(r.data)) for r in records(log)]
    assert told == [
        (4096, 4096, DATA, b"\7" * 4096), (8192, 40 * MIB, ZEROS, None), (0, MIB, TRIM, None),
        (777, 3, DATA, b"odd"), (SIZE - 512, 512, DATA, b"e" * 512),
    ]  # fmt: skip


def test_a_write_is_not_answered_before_it_is_in_the_log(served: Served) -> None:
    log, process = served.log(), served.start()
    with served.guest() as guest:
        os.kill(process, signal.SIGSTOP)
        threads = list(Path(f"/proc/{process}/task").glob("*/stat"))
        until(lambda: all(") T " in one.read_text() for one in threads))
        guest.write(0, b"x" * 512)
        answered = threading.Thread(target=guest.wait)
        answered.start()
        answered.join(0.1)
        assert answered.is_alive()
        assert log.size() == 0
        os.kill(process, signal.SIGCONT)
        answered.join(10.0)
        assert not answered.is_alive()

    assert len(records(log)) == 1


def test_a_long_write_becomes_several_records_and_pieces_hold_whole_ones(served: Served) -> None:
    log = served.log()
    log.set_open(True)
    # As QEMU may write, in one request; our own client would cut it.
    commands = ["-c", f"write -q -P 6 1000 {LIMIT}", "-c", "write -q -P 7 0 3M"]
    subprocess.run(
        ["qemu-io", "-f", "raw", *commands, f"nbd+unix:///?socket={served.socket.path}"],
        check=True, capture_output=True,
    )  # fmt: skip
    pieces = list(log.read(0, log.size(), most=write_log.LONGEST + 4096))
    found = [record for piece in pieces for record in write_log.records(piece)]
    disk = bytearray(4 * MIB)
    for one in found:
        assert one.data is not None
        disk[one.offset : one.end] = one.data

    assert b"".join(pieces) == b"".join(log.read(0, log.size()))
    assert max(one.length for one in found) == write_log.LONGEST
    assert len(pieces) >= 5
    assert disk == b"\7" * (3 * MIB) + bytes(MIB)
    with pytest.raises(ValueError, match="may not hold a record"):
        next(log.read(0, log.size(), most=write_log.LONGEST))


def test_consumed_room_is_free_and_the_rest_stays(served: Served) -> None:
    log = served.log()
    with served.guest() as guest:
        guest.write(0, CONTENT[: MIB + 100])
        guest.wait()
        middle = log.size()
        guest.write(10 * MIB, CONTENT[:5000])
        guest.wait()
        log.consume(middle)

        assert room(served.place) <= 12 * 1024
        [left] = records(log)
        assert left.offset == 10 * MIB
        assert bytes(left.data or b"") == CONTENT[:5000]
        with pytest.raises(ValueError, match="has no bytes"):
            next(log.read(0, middle))
        for wrong in (middle - 1, log.size() + 1):
            with pytest.raises(ValueError, match="cannot be consumed"):
                log.consume(wrong)

        for _ in range(20):
            guest.write(0, CONTENT[:MIB])
            guest.wait()
            log.consume(log.size())
        assert log.size() > 20 * MIB
        assert room(served.place) <= 4096


class Pushing:
    """A guest that writes until something holds it."""

    def __init__(self, served: Served, much: int) -> None:
        self.error: HypervisorError | None = None
        self._served, self._much = served, much
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with suppress(HypervisorError), self._served.guest() as guest:
            try:
                for offset in range(0, self._much, 65536):
                    guest.write(offset, CONTENT[:65536])
                guest.wait()
            except HypervisorError as exc:
                self.error = exc

    def held(self, log: WriteLog) -> int:
        """Wait until it is held; how much of the log is not consumed then."""
        before = log.waited()
        until(lambda: log.waited() > before + 0.02)
        return log.size() - log.consumed

    def end(self) -> None:
        self.thread.join(10.0)
        assert not self.thread.is_alive()


def test_writes_wait_for_the_backup_and_go_on_when_it_has_caught_up(served: Served) -> None:
    log = served.log()
    guest = Pushing(served, 8 * MIB)
    held = []
    for _ in range(3):
        held.append(guest.held(log))
        log.consume(log.size())
    guest.end()

    assert guest.error is None
    assert all(LIMIT < one <= LIMIT + 65536 + 16 for one in held)
    assert log.failed() is None
    assert 0.06 < log.waited() < 10.0


def test_writes_that_wait_go_on_at_once_where_they_must(served: Served) -> None:
    log = served.log()
    guest = Pushing(served, 8 * MIB)
    guest.held(log)
    log.set_open(True)
    guest.end()

    assert guest.error is None
    assert log.size() > 8 * MIB
    assert len(records(log)) == 128


def test_beyond_all_room_a_write_is_refused_and_the_log_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbdkit_server.stop(served.place, served.socket)
    monkeypatch.setattr(nbdkit_server, "_MORE", MIB)
    served.start()
    log = served.log()
    log.set_open(True)
    guest = Pushing(served, 8 * MIB)
    guest.end()

    assert "No space left on device" in str(guest.error)
    assert log.failed() == "No space left on device"
    assert LIMIT + MIB < log.size() <= LIMIT + MIB + 65536 + 16
    assert len(records(log)) == 48


@pytest.mark.parametrize("must", [False, True], ids=["waits", "must not wait"])
def test_a_full_tmpfs_is_as_a_full_log(served: Served, tmp_path: Path, must: bool) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    small = Served(LogPlace(folder=tmp_path, disk=1), served.socket)
    try:
        nbdkit_server.stop(served.place, served.socket)
        small.start()
        with WriteLog(small.place) as log:
            guest = Pushing(small, 3 * MIB)
            guest.held(log)
            assert 0 < log.size() < MIB
            assert len(records(log)) * 65552 == log.size()
            if must:
                log.set_open(True)
            while not must and guest.thread.is_alive():
                log.consume(log.size())
                time.sleep(0.001)
            guest.end()
            assert (guest.error is None, log.failed()) == (
                (False, "No space left on device") if must else (True, None)
            )
    finally:
        nbdkit_server.stop(small.place, small.socket)
        subprocess.run(["umount", tmp_path], check=True)


READER = """
import sys, time
from pathlib import Path
from vmckpt.replication.disks.epoch_log import LogPlace, WriteLog
log = WriteLog(LogPlace(folder=Path(sys.argv[1]), disk=0))
while True:
    for piece in log.read(log.consumed, log.size()):
        pass
    log.consume(log.size())
    print(log.consumed, flush=True)
    time.sleep(0.001)
"""


def test_a_reader_that_is_killed_is_followed_by_another(served: Served) -> None:
    guest = Pushing(served, 32 * MIB)
    for _ in range(3):
        words = [sys.executable, "-c", READER, str(served.place.folder)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            reader.stdout.readline()
            reader.kill()
    log = served.log()
    log.set_open(True)
    guest.end()

    assert guest.error is None
    assert log.size() == 512 * (65536 + write_log.HEADER.size)
    left = records(log)
    assert left[-1].end == 32 * MIB
    assert [one.offset for one in left] == [32 * MIB - 65536 * n for n in range(len(left), 0, -1)]
    assert room(served.place) <= log.size() - log.consumed + 8192


def test_what_a_dying_reader_left_is_given_back_by_the_next(served: Served) -> None:
    with served.guest() as guest:
        guest.write(0, CONTENT[:MIB])
        guest.wait()
    with Control(served.place.control) as control:
        control.consumed = control.written
    before = room(served.place)
    served.log()

    assert (before >= MIB, room(served.place) <= 4096) == (True, True)


def test_a_log_that_makes_no_sense_is_named(served: Served) -> None:
    log = served.log()
    with served.guest() as guest:
        guest.write(0, CONTENT[:8192])
        guest.wait()
    with served.place.log.open("r+b") as file:
        file.write(b"\xff" * 8)

    with pytest.raises(DiskLogError, match=r"disk0.log cannot be read at 0"):
        records(log)
    with served.place.log.open("r+b") as file:
        file.write(write_log.header(0, 8192))
    with pytest.raises(DiskLogError, match="no whole record at 0"):
        records(log, 0, 4096)
