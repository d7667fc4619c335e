"""Which pages a process has written, asked from outside."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.scratch_qemu import SIZE, Scratch
from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import write_tracking
from vmckpt.capture.memory.page_runs import Runs, merged, numbers
from vmckpt.capture.memory.write_tracking import (
    CannotTrack,
    MemoryRange,
    Why,
    WriteTracking,
)
from vmckpt.hypervisor.qemu_process import injection, userfaultfd
from vmckpt.hypervisor.qemu_process.injection import CannotInject
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess


@pytest.fixture
def process() -> Iterator[WrittenProcess]:
    with WrittenProcess() as made:
        yield made


def told(found: list[Runs]) -> list[int]:
    assert len(found) == 1
    return [int(number) for number in numbers(found[0])]


def tracked(process: WrittenProcess) -> WriteTracking:
    return WriteTracking(process.held, [process.range])


@pytest.mark.parametrize("huge", [False, True])
def test_each_written_page_is_found_once_it_was_protected(huge: bool) -> None:
    with WrittenProcess(2048, huge=huge) as process, tracked(process) as writes:
        assert told(writes.collect_all()) == list(range(2048))
        assert told(writes.scan()) == []
        dice = random.Random(7)
        for _ in range(20):
            pages = sorted(dice.sample(range(2048), dice.randint(1, 200)))
            process.write(pages)
            found = writes.scan()
            assert told(found) == pages
            assert told(writes.scan()) == pages, "a scan alone changes nothing"
            assert told(writes.collect_all()) == pages
            assert told(writes.scan()) == []


def test_more_runs_than_one_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tracking, "_FOUND", 8)
    with WrittenProcess() as process, tracked(process) as writes:
        writes.collect_all()
        process.write(range(0, 256, 3))
        assert told(writes.scan()) == list(range(0, 256, 3))


def test_ranges_are_told_apart(process: WrittenProcess) -> None:
    start, half = process.range.start, process.range.size // 2
    with WriteTracking(
        process.held, [MemoryRange(start + half, half), MemoryRange(start, half)]
    ) as writes:
        writes.collect_all()
        process.write([0, 130])
        assert [one.tolist() for one in writes.scan()] == [[[2, 3]], [[0, 1]]]


def test_a_range_that_joins_counts_as_written_and_others_are_as_they_were(
    process: WrittenProcess,
) -> None:
    start, half = process.range.start, process.range.size // 2
    first, second = MemoryRange(start, half), MemoryRange(start + half, half)
    with WriteTracking(process.held, [second]) as writes:
        writes.collect_all()
        process.write([3, 130])
        writes.extend([first, second])
        assert [one.tolist() for one in writes.scan()] == [[[0, 128]], [[2, 3]]]
        writes.collect_all()
        process.write([4, 131])
        assert [one.tolist() for one in writes.scan()] == [[[4, 5]], [[3, 4]]]
        with pytest.raises(CannotTrack):
            writes.extend([MemoryRange(1 << 40, 4096), first, second])
        assert [one.tolist() for one in writes.scan()] == [[[4, 5]], [[3, 4]]]
    assert not process.watched()


@pytest.mark.parametrize("accelerator", ["tcg", "kvm"])
def test_nothing_that_a_guest_writes_is_missed(accelerator: str) -> None:
    if accelerator == "kvm" and not Path("/dev/kvm").exists():
        pytest.skip("this machine has no KVM")
    with Scratch(accelerator=accelerator) as guest:
        at = next(
            int(line.split("-")[0], 16)
            for line in Path(f"/proc/{guest.pid}/maps").read_text().splitlines()
            if "/vmckpt-scratch-" in line
        )
        with (
            HeldProcess(guest.pid) as held,
            WriteTracking(held, [MemoryRange(at, SIZE)]) as writes,
        ):
            found: set[int] = set()
            guest.tell("stop", {})
            writes.collect_all()
            before = guest.memory.pages.copy()
            for _ in range(10):
                guest.tell("cont", {})
                assert guest.goes_on()
                for _ in range(3):  # while it runs
                    found |= {*told(writes.collect_all())}
                guest.tell("stop", {})
                found |= {*told(writes.collect_all())}
                now = guest.memory.pages.copy()
                assert {*np.flatnonzero((now != before).any(axis=1)).tolist()} <= found
                before, found = now, set()
        guest.tell("cont", {})
        assert guest.goes_on()


def test_nothing_is_left_at_the_end(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        writes.collect_all()
        assert process.protected() == 256
        assert process.watched()
        assert list(userfaultfd.opened(process.held)) == []
    assert not process.watched()
    assert process.protected() == 0
    process.write(range(256))


def test_two_do_not_track_the_same_memory(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        writes.collect_all()
        with pytest.raises(CannotTrack, match="another userfaultfd") as caught:
            tracked(process)
        assert caught.value.why is Why.CONFLICT
        process.write([5])
        assert told(writes.scan()) == [5]


def test_an_older_kernel_is_named(process: WrittenProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tracking, "_FEATURES", 1 << 60)  # one that this kernel lacks
    with pytest.raises(CannotTrack, match=r"Linux 6\.7 or later") as caught:
        tracked(process)
    assert caught.value.why is Why.OLD_KERNEL
    assert not process.watched()


def test_larger_pages_are_refused(process: WrittenProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda _: 65536)
    with pytest.raises(CannotTrack, match="larger than 4 KiB") as caught:
        tracked(process)
    assert caught.value.why is Why.PAGE_SIZE


def test_a_refused_trace_is_named(process: WrittenProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(held: HeldProcess, *_: object) -> None:
        raise CannotInject(held.pid, injection.Why.REFUSED)

    monkeypatch.setattr(injection, "run", refused)
    with pytest.raises(CannotTrack, match="does not permit tracing") as caught:
        tracked(process)
    assert caught.value.why is Why.NO_CALL


def test_page_tables_that_may_not_be_read_are_named(
    process: WrittenProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: str, *words: int) -> int:
        if path.endswith("/pagemap"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *words)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(CannotTrack, match="not permitted to read QEMU's page tables") as caught:
        tracked(process)
    assert caught.value.why is Why.NO_ACCESS
    assert not process.watched()


def test_memory_that_was_replaced_is_not_trusted(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        writes.collect_all()
        process.map_again()
        with pytest.raises(CannotTrack) as caught:
            writes.scan()
        assert caught.value.why is Why.GONE


def test_a_process_that_has_ended_is_named(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        process.kill()
        with pytest.raises(CannotTrack) as caught:
            writes.collect_all()
        assert caught.value.why is Why.ENDED
    with pytest.raises(CannotTrack):
        tracked(process)


# Tracks a process, and is killed at the Nth call of ptrace, ioctl or pidfd_getfd: before it.
_KILLED = """
import fcntl, os, signal, sys
from vmckpt.capture.memory.write_tracking import MemoryRange, WriteTracking
from vmckpt.hypervisor.qemu_process import injection, userfaultfd
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
pid, start, size, left = map(int, sys.argv[1:])
def counted(call):
    def instead(*words):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*words)
    return instead
injection._ptrace = counted(injection._ptrace)
userfaultfd.duplicate = counted(userfaultfd.duplicate)
fcntl.ioctl = counted(fcntl.ioctl)
with WriteTracking(HeldProcess(pid), [MemoryRange(start, size)]) as writes:
    writes.collect_all()
    writes.collect_all()
    writes.scan()
"""


def test_nothing_is_left_wherever_the_tracker_is_killed(process: WrittenProcess) -> None:
    words = [str(process.held.pid), str(process.range.start), str(process.range.size)]
    codes, left = [], 0
    for step in range(1, 80):
        command = [sys.executable, "-c", _KILLED, *words, str(step)]
        codes.append(subprocess.run(command, check=False).returncode)
        assert not process.watched(), step
        assert process.protected() == 0, step
        process.write(range(256))
        left += len(list(userfaultfd.opened(process.held)))
        with tracked(process) as writes:
            writes.collect_all()
            process.write([step])
            assert told(writes.scan()) == [step]
        assert list(userfaultfd.opened(process.held)) == [], step
        if codes[-1] == 0:
            break
    assert len(codes) > 20
    assert {*codes[:-1]} == {-signal.SIGKILL}
    assert codes[-1] == 0
    assert left > 0, "no step was hit at which the process has the descriptor"


def test_what_is_written_beside_a_run_meanwhile_is_not_missed(
    process: WrittenProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the scan that finds the neighbourhood, and the one that protects it."""

    def and_write(runs: Runs, near: int) -> Runs:
        process.write([9])
        return merged(runs, near)

    with tracked(process) as writes:
        writes.collect_all()
        process.write([7, 11])
        monkeypatch.setattr(write_tracking, "merged", and_write)
        assert told(writes.collect_all()) == [7, 9, 11]
