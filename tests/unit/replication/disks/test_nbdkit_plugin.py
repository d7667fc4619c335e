"""A disk's write log with a real nbdkit: what is in it, and what the guest waits for."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk_logs import LIMIT, SIZE, Pushing, Served, records, until
from vmckpt.replication.disks import nbdkit_server, write_log
from vmckpt.replication.disks.epoch_log import LogPlace, WriteLog
from vmckpt.replication.disks.write_log import DATA, TRIM, ZEROS
from vmckpt.units import MIB


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
    with pytest.raises(ValueError, match="too small for a record"):
        next(log.read(0, log.size(), most=write_log.LONGEST))


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
