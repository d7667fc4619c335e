"""A lease that the kernel enforces: a timer inside QEMU that kills it unless it is set again.

The timer is QEMU's own (timer_create(2) with SIGKILL), so it needs none of our processes to be
alive or to be scheduled. It goes by CLOCK_BOOTTIME, as leases do, and ends at an absolute time: a
renewal that is late gives nothing away. /proc/PID/timers shows it, so nothing need be remembered.
"""

import re
import struct
from pathlib import Path

from vmckpt.hypervisor.qemu_process import injection
from vmckpt.hypervisor.qemu_process.injection import SCRATCH, CannotInject, Stopped
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.lease.clock import boottime
from vmckpt.units import Seconds

_CREATE, _SETTIME, _DELETE = 222, 223, 226
_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 1, 9
_ID_AT = SCRATCH - 64
_TIMER = re.compile(
    rf"^ID: (\d+)\nsignal: {_SIGKILL}/.*\nnotify: signal/.*\nClockID: {_BOOTTIME}$", re.MULTILINE
)


class LeaseTimer:
    """The timer of one process; see the functions of these names."""

    def __init__(self, process: HeldProcess) -> None:
        self._process = process

    def arm(self, ends: float) -> None:
        arm(self._process, ends)

    def disarm(self) -> None:
        disarm(self._process)


def arm(process: HeldProcess, ends: float) -> None:
    """The kernel kills the process at that time of CLOCK_BOOTTIME, unless it is armed again.

    A time that has passed kills it at once. Raises CannotInject: what was armed stays as it was,
    and ValueError.
    """
    if not 0 < ends < 1 << 40:
        raise ValueError(f"{ends} is no time of the clock")

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
    """Remove the timer; fine if there is none. Raises CannotInject."""
    if armed(process) is None:
        return

    def work(stopped: Stopped) -> None:
        timer = armed(process)
        if timer is not None:
            stopped.call(_DELETE, timer)

    injection.run(process, work)


def armed(process: HeldProcess) -> int | None:
    """The ID of the process's lease timer; None if it has none. Raises OSError."""
    match = _TIMER.search(Path(f"/proc/{process.pid}/timers").read_text())
    return None if match is None else int(match[1])


def why_not(process: HeldProcess) -> str | None:
    """Why the kernel cannot enforce a lease of that process; None if it can.

    Tried by a call that changes nothing.
    """
    try:
        injection.run(process, lambda stopped: stopped.call(_GETPID))
    except CannotInject as exc:
        return exc.message
    except OSError as exc:
        return str(exc)
    return None


_GETPID = 39


def _create(stopped: Stopped) -> int:
    # struct sigevent: value, signal, SIGEV_SIGNAL
    stopped.write(struct.pack("<Qii", 0, _SIGKILL, 0).ljust(64, b"\0"))
    stopped.call(_CREATE, _BOOTTIME, stopped.scratch, stopped.scratch + _ID_AT)
    return int(struct.unpack("<i", stopped.read(4, _ID_AT))[0])


def _settime(stopped: Stopped, timer: int, ends: Seconds | float) -> None:
    seconds = int(ends)
    nanoseconds = int((ends - seconds) * 1e9)
    # struct itimerspec: no interval, then the time itself
    stopped.write(struct.pack("<4q", 0, 0, seconds, nanoseconds))
    stopped.call(_SETTIME, timer, _ABSOLUTE, stopped.scratch, 0)
