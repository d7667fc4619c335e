"""Which process asks and controls, and whether a controller still lives. Linux only: /proc."""

import os
import pwd
import socket
from functools import cache
from pathlib import Path

from vmckpt.journal.records import ControllerIdentity

_GONE = ("Z", "X", "x")
"""A process that has ended, whether or not its parent has looked."""


def asked_by() -> str:
    """user@host of whoever runs this; behind sudo, the one who called it."""
    user = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    if not user:
        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"


def asked_from() -> str | None:
    """The address an ssh session comes from, else the terminal; None if there is neither."""
    if words := os.environ.get("SSH_CONNECTION", "").split():
        return words[0]
    try:
        return os.ttyname(0)
    except OSError:
        return None


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> int | None:
    """When a process started, in ticks from boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, with whatever is in it.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in _GONE else int(fields[18])


def this_process() -> ControllerIdentity:
    """Ourselves."""
    pid = os.getpid()
    return ControllerIdentity(
        host=socket.gethostname(), boot=_boot(), pid=pid, started=_started(pid) or 0
    )


def is_alive(controller: ControllerIdentity) -> bool | None:
    """Whether that very process runs; None if it is on another machine and cannot be looked at."""
    if controller.boot == _boot():  # this machine, whatever it was called then
        return _started(controller.pid) == controller.started
    # A host of our name that booted at another time is this one, before it was booted last.
    return False if controller.host == socket.gethostname() else None
