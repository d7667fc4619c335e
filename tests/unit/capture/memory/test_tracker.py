"""The process that keeps a guest's write tracking between snapshots."""

import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import until
from tests.support.trackers import running
from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import tracker
from vmckpt.capture.memory.page_runs import numbers
from vmckpt.capture.memory.ram_blocks import RamBlock
from vmckpt.capture.memory.tracker import TrackerState
from vmckpt.capture.memory.write_tracking import WriteTracking
from vmckpt.errors import GuestLocked
from vmckpt.util import host_directories

GUEST = str(uuid.uuid4())


@pytest.fixture(autouse=True)
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vmckpt-", dir="/run") as name:  # paths must be short
        folder = Path(name) / "tracking"
        folder.mkdir()
        monkeypatch.setattr(host_directories, "RUN", Path(name))
        monkeypatch.setattr(host_directories, "run_dir", lambda _: folder)
        yield folder


@pytest.fixture
def process() -> Iterator[WrittenProcess]:
    with WrittenProcess() as made:
        yield made


def state(process: WrittenProcess, number: int | None = 7) -> TrackerState:
    return TrackerState(number, (RamBlock("pc.ram", process.range),))


def started(process: WrittenProcess) -> int:
    """Start a tracker; its process ID."""
    with WriteTracking(process.held, [process.range]) as writes:
        writes.collect_all()
        tracker.start(GUEST, process.held, state(process), writes.descriptor)
    found = running(tracker.place(GUEST, process.held.pid).parent)
    assert len(found) == 1
    return found[0]


def written(process: WrittenProcess, descriptor: int) -> list[int]:
    with WriteTracking(process.held, [process.range], descriptor) as writes:
        return [int(one) for one in numbers(writes.collect_all()[0])]


def test_it_keeps_the_protection_and_what_it_refers_to(process: WrittenProcess) -> None:
    started(process)
    process.write([3, 9])
    lent = tracker.take(GUEST, process.held)
    assert lent is not None
    with lent:
        assert lent.state == state(process)
        assert written(process, lent.descriptor) == [3, 9]
        lent.keep(8)
    process.write([5])
    again = tracker.take(GUEST, process.held)
    assert again is not None
    with again:
        assert again.state == state(process, 8)
        assert written(process, again.descriptor) == [5]
    torn = tracker.take(GUEST, process.held)
    assert torn is not None
    with torn:  # the capture before reported no end
        assert torn.state == state(process, None)
        os.close(torn.descriptor)
    assert tracker.end(GUEST)
    assert process.protected() == 0
    assert not tracker.end(GUEST)
    assert tracker.take(GUEST, process.held) is None


def test_nothing_is_left_when_it_is_killed(process: WrittenProcess) -> None:
    os.kill(started(process), signal.SIGKILL)
    until(lambda: process.protected() == 0, limit=5)
    process.write(range(256))
    assert tracker.take(GUEST, process.held) is None
    started(process)  # its socket does not keep another one from beginning
    assert tracker.end(GUEST)


def test_it_ends_with_the_process(process: WrittenProcess, run_dir: Path) -> None:
    started(process)
    assert len(list(run_dir.iterdir())) == 1
    process.kill()
    until(lambda: not list(run_dir.iterdir()), limit=5)


def test_one_that_died_with_its_process_leaves_no_socket(
    process: WrittenProcess, run_dir: Path
) -> None:
    os.kill(started(process), signal.SIGKILL)
    tracker.sweep()
    assert len(list(run_dir.iterdir())) == 1  # of this process; the next snapshot removes it
    process.kill()
    tracker.sweep()
    assert list(run_dir.iterdir()) == []


def test_two_agents_do_not_use_it_at_once(
    process: WrittenProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(process)
    lent = tracker.take(GUEST, process.held)
    assert lent is not None
    monkeypatch.setattr(tracker, "_PATIENCE", 0.2)
    with lent:
        with pytest.raises(GuestLocked, match="another agent is using"):
            tracker.take(GUEST, process.held)
        with pytest.raises(GuestLocked, match="another agent is using"):
            tracker.end(GUEST)
        lent.keep(8)
        os.close(lent.descriptor)
    again = tracker.take(GUEST, process.held)  # neither of the two has changed anything
    assert again is not None
    with again:
        assert again.state == state(process, 8)
        os.close(again.descriptor)
    assert tracker.end(GUEST)


@pytest.mark.parametrize("message", [b"{}", b"[]", b"nonsense", b'{"do": "keep", "number": "x"}'])
def test_nonsense_does_not_end_it(process: WrittenProcess, message: bytes) -> None:
    started(process)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(str(tracker.place(GUEST, process.held.pid)))
        line.send(message)
        assert line.recv(100) == b""
    lent = tracker.take(GUEST, process.held)
    assert lent is not None
    with lent:
        assert lent.state == state(process)
        os.close(lent.descriptor)
        lent.end()
    until(lambda: process.protected() == 0, limit=5)


def test_only_root_reaches_it(process: WrittenProcess) -> None:
    pid = started(process)
    assert tracker.place(GUEST, process.held.pid).stat().st_mode & 0o777 == 0o600
    assert b"start" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert tracker.end(GUEST)
