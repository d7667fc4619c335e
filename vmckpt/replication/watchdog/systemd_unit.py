"""Run a watchdog as a transient systemd unit in its own cgroup. systemd restarts the unit.

So the watchdog survives the end of a login session and the out-of-memory killer in an agent's
cgroup. The watchdog's facts are part of the unit (StandardInputData=): systemd passes them on
standard input at each start, and no file is needed.
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
"""Exists if systemd runs this host (sd_booted(3))."""
_PROPERTIES = (
    "Type=exec",
    "Restart=always", "RestartPreventExitStatus=0", "RestartSec=250ms", "StartLimitIntervalSec=0",
    # systemd also kills a watchdog that is stopped or hung: see `Signs`.
    "NotifyAccess=main", "WatchdogSec=2s", "WatchdogSignal=SIGKILL",
    # The agents that the watchdog starts must survive it.
    "KillMode=process", "OOMPolicy=continue",
    "OOMScoreAdjust=-1000", "ManagedOOMPreference=omit",
    # The watchdog must outlive a guest that is shut down with its host.
    "DefaultDependencies=no",
)  # fmt: skip
_SIGNS = 0.5
"""Time between two keep-alive messages, in seconds."""


def available() -> bool:
    """Return whether systemd runs this host and can start transient units."""
    return _BOOTED.is_dir() and shutil.which("systemd-run") is not None


def name_of(folder: str) -> str:
    """Return the unit name for a watchdog's directory, whose name is the guest's UUID."""
    return f"vmckpt-watchdog-{Path(folder).name}.service"


def unit_command(name: str, words: Sequence[str], told: bytes) -> list[str]:
    """Return the command that starts the unit `name`. Pure.

    The unit runs the command `words` with `told` on standard input.
    """
    data = base64.b64encode(told).decode()
    properties = (*_PROPERTIES, "StandardInput=data", f"StandardInputData={data}")
    return [
        "systemd-run", "--quiet", "--collect", "--no-ask-password",
        f"--unit={name}", "--slice=vmckpt.slice",
        "--description=vmckpt: enforces the lease of a protected guest",
        *(f"--property={one}" for one in properties),
        # The agent's launcher sets the same variables.
        "--setenv=PYTHONSAFEPATH=1", "--setenv=PYTHONDONTWRITEBYTECODE=1",
        "--", *words,
    ]  # fmt: skip


class Signs:
    """Keep-alive messages to systemd. Does nothing in a process that is not a unit."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")  # hidden from child processes
        self._last = float("-inf")

    def give(self, now: float) -> None:
        """Send a keep-alive message if one is due; `now` is in seconds of any clock."""
        if not self._address or now < self._last + _SIGNS:
            return
        self._last = now
        address = self._address.replace("@", "\0", 1)
        flags = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        # A message is dropped if systemd's socket is full.
        with suppress(OSError), socket.socket(socket.AF_UNIX, flags) as line:
            line.sendto(b"WATCHDOG=1", address)


def start(words: Sequence[str], told: bytes, *, folder: str, limit: float) -> None:
    """Start the unit of a directory, unless it already exists; systemd then restarts it if needed.

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
