"""A lease enforced by the kernel: a timer in the QEMU process kills QEMU unless rearmed in time.

The timer belongs to QEMU (timer_create(2) with SIGKILL), so it works even if no vmckpt process is
alive or scheduled. It uses CLOCK_BOOTTIME, as leases do, and expires at an absolute time, so a late
call does not extend the lease. /proc/PID/timers shows the timer, so no state has to be stored.
"""

import re
import struct
from pathlib import Path

from vmckpt.hypervisor.qemu_process import injection
from vmckpt.hypervisor.qemu_process.injection import SCRATCH, CannotInject, Stopped
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.lease.clock import boottime
from vmckpt.units import Seconds

_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 1, 9
_ID_AT = SCRATCH - 64
_TIMER = re.compile(
    rf"^ID: (\d+)\nsignal: {_SIGKILL}/.*\nnotify: signal/.*\nClockID: {_BOOTTIME}$", re.MULTILINE
)


class LeaseTimer:
    """The lease timer of one process. See `arm` and `disarm`."""

    def __init__(self, process: HeldProcess) -> None:
        self._process = process

    def arm(self, ends: float) -> None:
        arm(self._process, ends)

    def disarm(self) -> None:
        disarm(self._process)


def arm(process: HeldProcess, ends: float) -> None:
    """Have the kernel kill the process at a CLOCK_BOOTTIME time, unless the timer is rearmed.

    `ends`: in seconds; a time in the past kills the process immediately. Raises CannotInject, in
    which case an armed timer stays unchanged or, at the time limit, may have the new time;
    ValueError if `ends` is out of range; OSError.
    """
    if not 0 < ends < 1 << 40:
        raise ValueError(f"{ends} is not a valid time")

    def work(stopped: Stopped) -> None:
        found = armed(process)
        timer = _create(stopped) if found is None else found
        _settime(stopped, timer, ends)

    try:
        injection.run(process, work)
    except CannotInject:
        if boottime() < ends or process.lives():
            raise


def disarm(process: HeldProcess) -> None:
    """Remove the timer, if the process has a timer. Raises CannotInject, OSError."""
    if armed(process) is None:
        return

    def work(stopped: Stopped) -> None:
        timer = armed(process)
        if timer is not None:
            stopped.syscall("timer_delete", timer)

    injection.run(process, work)


def armed(process: HeldProcess) -> int | None:
    """Return the ID of the process's lease timer; None if it has no timer. Raises OSError."""
    match = _TIMER.search(Path(f"/proc/{process.pid}/timers").read_text())
    return None if match is None else int(match[1])


def why_not(process: HeldProcess) -> str | None:
    """Return why the kernel cannot enforce a lease of the process; None if it can.

    As a test, makes a system call that changes nothing in the process.
    """
    try:
        injection.run(process, lambda stopped: stopped.syscall("getpid"))
    except CannotInject as exc:
        return exc.message
    except OSError as exc:
        return str(exc)
    return None


def _create(stopped: Stopped) -> int:
    # struct sigevent: value, signal, SIGEV_SIGNAL
    stopped.write(struct.pack("<Qii", 0, _SIGKILL, 0).ljust(64, b"\0"))
    stopped.syscall("timer_create", _BOOTTIME, stopped.scratch, stopped.scratch + _ID_AT)
    return int(struct.unpack("<i", stopped.read(4, _ID_AT))[0])


def _settime(stopped: Stopped, timer: int, ends: Seconds | float) -> None:
    seconds = int(ends)
    nanoseconds = int((ends - seconds) * 1e9)
    # struct itimerspec: no interval, then the time itself
    stopped.write(struct.pack("<4q", 0, 0, seconds, nanoseconds))
    stopped.syscall("timer_settime", timer, _ABSOLUTE, stopped.scratch, 0)
