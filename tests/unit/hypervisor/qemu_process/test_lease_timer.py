"""The lease timer's system calls, with a process that only notes them."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from vmckpt.hypervisor.qemu_process import injection, lease_timer
from vmckpt.hypervisor.qemu_process.injection import CannotInject, Stopped, Why
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.lease.clock import boottime

# From linux/time.h and signal.h.
CREATE, SETTIME, DELETE = "timer_create", "timer_settime", "timer_delete"
CLOCK_BOOTTIME, TIMER_ABSTIME, SIGKILL, SIGEV_SIGNAL = 7, 1, 9, 0
SCRATCH = 0x7000
LEASE = "ID: {}\nsignal: 9/0000000000000000\nnotify: signal/pid.77\nClockID: 7\n"
ALARM = "ID: 0\nsignal: 14/0000000000000000\nnotify: signal/pid.77\nClockID: 7\n"
OTHER_CLOCK = "ID: 1\nsignal: 9/0000000000000000\nnotify: signal/pid.77\nClockID: 1\n"
A_THREADS = "ID: 2\nsignal: 9/0000000000000000\nnotify: thread/tid.77\nClockID: 7\n"


class Qemu:
    """A stopped process; its timers are what a file says."""

    def __init__(self, folder: Path) -> None:
        self.pid = f"..{folder}"
        """Of /proc/PID/timers."""
        self._timers = folder / "timers"
        self.has("")
        self.fails: Why | None = None
        self.dies = False
        self.calls: list[tuple[Any, ...]] = []
        self.written: list[bytes] = []
        self.scratch = SCRATCH

    def has(self, timers: str) -> None:
        self._timers.write_text(timers)

    def lives(self) -> bool:
        return not self.dies

    def run(self, process: object, work: Callable[[Stopped], Any]) -> Any:
        assert process is self
        if self.fails is not None:
            raise CannotInject(77, self.fails)
        return work(cast("Stopped", self))

    def write(self, content: bytes) -> None:
        self.written.append(content)

    def read(self, length: int, at: int) -> bytes:
        """The ID of a new timer, where the call was told to put it."""
        assert self.calls[-1][-1] == SCRATCH + at
        return struct.pack("<i", 3)[:length]

    def syscall(self, name: str, *arguments: int) -> int:
        self.calls.append((name, *arguments))
        return 0

    @property
    def held(self) -> HeldProcess:
        return cast("HeldProcess", self)


@pytest.fixture
def qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Qemu:
    made = Qemu(tmp_path)
    monkeypatch.setattr(injection, "run", made.run)
    return made


def test_a_new_timer_kills_at_an_absolute_time_of_the_clock_that_runs_on_in_sleep(
    qemu: Qemu,
) -> None:
    lease_timer.arm(qemu.held, 1234.25)
    create, settime = qemu.calls
    assert create[:3] == (CREATE, CLOCK_BOOTTIME, SCRATCH)
    assert settime == (SETTIME, 3, TIMER_ABSTIME, SCRATCH, 0)
    event, time = qemu.written
    assert struct.unpack("<Qii", event[:16]) == (0, SIGKILL, SIGEV_SIGNAL)
    # It does not repeat.
    assert struct.unpack("<4q", time) == (0, 0, 1234, 250_000_000)


def test_one_that_is_there_is_set_again(qemu: Qemu) -> None:
    qemu.has(ALARM + LEASE.format(5))
    lease_timer.arm(qemu.held, 1234.0)
    assert qemu.calls == [(SETTIME, 5, TIMER_ABSTIME, SCRATCH, 0)]


@pytest.mark.parametrize("timers", ["", ALARM, OTHER_CLOCK, A_THREADS])
def test_timers_of_the_programs_own_are_left_alone(qemu: Qemu, timers: str) -> None:
    qemu.has(timers)
    assert lease_timer.armed(qemu.held) is None
    lease_timer.disarm(qemu.held)
    assert qemu.calls == []
    lease_timer.arm(qemu.held, 1234.0)
    assert qemu.calls[0][0] == CREATE


def test_it_is_removed_by_its_own_id(qemu: Qemu) -> None:
    qemu.has(ALARM + LEASE.format(5))
    lease_timer.disarm(qemu.held)
    assert qemu.calls == [(DELETE, 5)]


@pytest.mark.parametrize("ends_in", [60.0, -60.0])
def test_one_that_cannot_be_set_is_an_error_while_the_process_lives(
    qemu: Qemu, ends_in: float
) -> None:
    qemu.fails = Why.HANGS
    with pytest.raises(CannotInject, match="does not stop"):
        lease_timer.arm(qemu.held, boottime() + ends_in)


def test_a_process_that_has_ended_needs_none_once_its_lease_has_run_out(qemu: Qemu) -> None:
    qemu.fails, qemu.dies = Why.ENDED, True
    lease_timer.arm(qemu.held, boottime() - 1.0)
    with pytest.raises(CannotInject, match="has ended"):
        lease_timer.arm(qemu.held, boottime() + 60.0)
