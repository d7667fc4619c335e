"""Where last copies of memory are kept, how much room there is, and how they go.

One folder for each QEMU process, on tmpfs and for root alone. It goes with its QEMU: a shell waits
for the process to end, and the next capture removes what a killed shell has left.
"""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.checkpoint import guestmemory
from vmckpt.units import Bytes
from vmckpt.util import host_directories

_NAME = re.compile(r"[0-9a-f-]{36}-(\d+)-(\d+)")
_LOCK, _MARK = ".lock", ".watched"
# tail looks once a second whether the process is there. Who still stores the copy holds the lock.
_WAIT = 'tail --pid="$0" -f /dev/null; exec flock "$1.lock" rm -rf "$1" "$1.watched" "$1.lock"'
_MEMORY = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


def root() -> Path:
    """The folder of all copies. Raises RemoteError if others can have written there."""
    return host_directories.memory_dir("snapshots")


def place(guest: str, process: int) -> Path:
    """The folder for a guest (a UUID) that is that process; `.lock` beside it is its lock."""
    return root() / f"{guest}-{process}-{guestmemory.started(process)}"


def room() -> Bytes:
    """How much a copy may take: of the tmpfs, and of memory that is free or easily freed."""
    stat = os.statvfs(host_directories.SHM)
    found = _MEMORY.search(Path("/proc/meminfo").read_text())
    free = int(found[1]) << 10 if found else 0
    return Bytes(min(stat.f_bavail * stat.f_frsize, free))


def watch(folder: Path, process: int) -> None:
    """See that a folder goes when a process has ended, also long after us. Raises OSError."""
    mark = folder.with_suffix(_MARK)
    with suppress(OSError, ValueError):
        if b"--pid=" in Path(f"/proc/{int(mark.read_text())}/cmdline").read_bytes():
            return
    # It outlives us: the shell that starts it is the one we wait for.
    waiting = ["setsid", "sh", "-c", _WAIT, str(process), str(folder)]
    script = '"$0" "$@" </dev/null >/dev/null 2>&1 & echo $!'
    told = subprocess.run(["sh", "-c", script, *waiting], cwd="/", capture_output=True, check=False)
    mark.write_bytes(told.stdout)


def drop(guest: str) -> None:
    """Remove every copy of a guest."""
    for folder in root().glob(f"{guest}-*-*"):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the copies whose QEMU has ended, but for one that somebody still stores."""
    with suppress(OSError):
        for folder in root().iterdir():
            found = _NAME.fullmatch(folder.name)
            if found is not None and not _lives(int(found[1]), found[2]):
                with suppress(OSError), _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.with_suffix(_MARK).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder.with_suffix(_LOCK)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        path.unlink(missing_ok=True)


def _lives(process: int, started: str) -> bool:
    try:
        return guestmemory.started(process) == started
    except (OSError, IndexError):
        return False
