"""A watchdog as a transient systemd unit: in a cgroup of its own, and started again by systemd.

So neither the end of a login session nor the out-of-memory killer in an agent's cgroup ends it for
good. Its facts are part of the unit (StandardInputData=), which systemd hands to it anew at each
start, as standard input; no file is read for them.
"""

import base64
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_BOOTED = Path("/run/systemd/system")
"""There if systemd runs this host (sd_booted(3))."""
_PROPERTIES = (
    "Type=exec",
    "Restart=always", "RestartPreventExitStatus=0", "RestartSec=250ms", "StartLimitIntervalSec=0",
    # One that is stopped, or hangs, is ended as well: see `Signs`.
    "NotifyAccess=main", "WatchdogSec=2s", "WatchdogSignal=SIGKILL",
    # The agents that it starts are not its own to end.
    "KillMode=process", "OOMPolicy=continue",
    "OOMScoreAdjust=-1000", "ManagedOOMPreference=omit",
    # A guest that is shut down with its host is guarded to its end.
    "DefaultDependencies=no",
)  # fmt: skip
_SIGNS = 0.5
"""Seconds between two signs of life."""


def available() -> bool:
    """Whether systemd runs this host and can be asked for a unit."""
    return _BOOTED.is_dir() and shutil.which("systemd-run") is not None


def name_of(folder: str) -> str:
    """The unit of the watchdog that has that folder, which is named after the guest's UUID."""
    return f"vmckpt-watchdog-{Path(folder).name}.service"


def unit_command(name: str, words: Sequence[str], told: bytes) -> list[str]:
    """What starts a unit of that name: `words` run with `told` on standard input. Pure."""
    data = base64.b64encode(told).decode()
    properties = (*_PROPERTIES, "StandardInput=data", f"StandardInputData={data}")
    return [
        "systemd-run", "--quiet", "--collect", "--no-ask-password",
        f"--unit={name}", "--slice=vmckpt.slice",
        "--description=vmckpt: enforces the lease of a protected guest",
        *(f"--property={one}" for one in properties),
        # As the agent's launcher has it.
        "--setenv=PYTHONSAFEPATH=1", "--setenv=PYTHONDONTWRITEBYTECODE=1",
        "--", *words,
    ]  # fmt: skip


class Signs:
    """Signs of life for systemd, from a process that is a unit; nothing in another process."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")  # not for what this process starts
        self._last = float("-inf")

    def give(self, now: float) -> None:
        """Say that this process works, now and then; `now` in seconds of any clock."""
        if not self._address or now < self._last + _SIGNS:
            return
        self._last = now
        address = self._address.replace("@", "\0", 1)
        flags = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        # A systemd that has no time for it misses one.
        with suppress(OSError), socket.socket(socket.AF_UNIX, flags) as line:
            line.sendto(b"WATCHDOG=1", address)


def start(words: Sequence[str], told: bytes, *, folder: str, limit: float) -> None:
    """Start the unit of a folder; fine if systemd has it already, and starts it again if need be.

    Raises OSError, subprocess.SubprocessError.
    """
    name = name_of(folder)
    try:
        subprocess.run(
            unit_command(name, words, told), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=limit, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError:
        if not _lives(name, limit):
            raise


def _lives(name: str, limit: float) -> bool:
    words = ["systemctl", "show", "--property=ActiveState", "--value", name]
    told = subprocess.run(words, capture_output=True, timeout=limit, check=False).stdout
    return told.strip() in (b"active", b"activating")
