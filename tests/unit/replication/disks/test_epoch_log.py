"""A disk's write log with a real nbdkit: what its reader gets, also after another one died."""

import subprocess
import sys

import pytest

from tests.support.disk_logs import CONTENT, Pushing, Served, records, room
from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.epoch_log import DiskLogError
from vmckpt.replication.disks.log_control import Control
from vmckpt.units import MIB


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
    with pytest.raises(DiskLogError, match="no complete record at 0"):
        records(log, 0, 4096)
