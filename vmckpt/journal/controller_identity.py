"""Identify the user and the process that run an operation, and check whether a process is alive.

Linux only, because it reads /proc.
"""

import os
import pwd
import socket
import sys
from functools import cache
from pathlib import Path

from vmckpt.journal.audit_chain import Actor
from vmckpt.journal.records import ControllerIdentity
from vmckpt.util import acting_user
from vmckpt.util.unicode_text import encodable

_GONE = ("Z", "X", "x")
"""States of a terminated process, including a zombie, for which the parent has not waited yet."""


class _Program:
    command: str | None = None
    """The command of vmckpt that this process runs; None: the process is another program."""


def runs(command: str) -> None:
    """Declare the command that this process runs, such as "vmckpt migrate", for the audit trail."""
    _Program.command = command


def actor() -> Actor:
    """Return the user and the command of this process, for the audit trail.

    The command contains no arguments, because they may contain secrets.
    """
    uid, acting = os.getuid(), acting_user.acting_user()
    return Actor(
        uid=uid,
        user=_user_name(uid),
        sudo_user=None if uid or acting.root else encodable(acting.name),
        command=encodable(_Program.command or Path(sys.argv[0]).name) or "python",
        host=socket.gethostname(),
    )


def asked_by() -> str:
    """Return user@host for this process's user or, under sudo, for the user that called sudo."""
    user = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    return f"{user or _user_name(os.geteuid())}@{socket.gethostname()}"


@cache
@cache  # each write to the journal needs it, and a directory service may take long
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def asked_from() -> str | None:
    """Return the client address of the ssh session, or the terminal; None if there is neither."""
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
    """Return a process's start time in clock ticks since boot; None if it is not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the process's name in parentheses, and may contain any character.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in _GONE else int(fields[18])


def this_process() -> ControllerIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ControllerIdentity(
        host=socket.gethostname(), boot=_boot(), pid=pid, started=_started(pid) or 0
    )


def is_alive(controller: ControllerIdentity) -> bool | None:
    """Return whether a controller's process is alive; None if the process is on another machine."""
    if controller.boot == _boot():  # this machine, even if its name has changed
        return _started(controller.pid) == controller.started
    # If only the boot ID differs, the process ran on this machine before its last boot.
    return False if controller.host == socket.gethostname() else None
