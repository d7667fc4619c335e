"""Find the files of a guest's shared memory, and manage the directories of its last copies.

QEMU reports its memory files. Each file is then looked up among the mappings of the QEMU process
and checked: only files on tmpfs and, on request, memfds can be used. For other kinds of memory, the
error names the kind.

Each QEMU process has a directory for the last copy, on tmpfs and readable only by root. A shell
waits until QEMU has exited, then removes the directory; if the shell is killed, the next capture
removes it.
"""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.capture.memory import ram_blocks
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Bytes
from vmckpt.util import host_directories

_PREPARE = (
    "use another method, or put <source type='file'/><access mode='shared'/> into <memoryBacking>"
    " of the guest's definition and restart the guest"
)
_REASONS = {
    "memory-backend-ram": "is private to QEMU",
    "memory-backend-memfd": "is a memfd, which vmckpt cannot read with every QEMU version",
}
_FILE, _MEMFD = "memory-backend-file", "memory-backend-memfd"


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """One file with memory of the guest."""

    names: tuple[str, ...]
    """Names that QEMU may use for the block."""
    size: int
    path: Path
    """Path that is valid outside QEMU's mount namespace."""
    qemu: HeldProcess | None = None
    """The QEMU process to which the path refers; None if the file belongs to vmckpt."""

    def open(self, flags: int) -> int:
        """Open the file as `os.open` does.

        Raises OSError, also if QEMU has ended: another process may be using its process ID.
        """
        opened = os.open(self.path, flags | os.O_CLOEXEC)
        if self.qemu is not None and not self.qemu.lives():
            os.close(opened)
            raise ProcessLookupError(f"QEMU, process {self.qemu.pid}, has ended")
        return opened


def files(
    monitor: Commands, process: HeldProcess, *, memfd: bool = False
) -> tuple[MemoryFile, ...]:
    """Return the files of a guest's memory, sorted by name. Open them only while `process` is held.

    `memfd`: also return memory in a memfd; only for a caller that does not use QEMU's migration.
    Raises CannotCapture if some memory is not in a usable file, HypervisorError, OSError.
    """
    backends: list[dict[str, Any]] = monitor.ask("query-memdev")
    if not backends:
        raise _cannot(monitor, "its memory", _REASONS["memory-backend-ram"])
    # QEMU lists them in an order that depends on all its objects, and may change at any time.
    backends = sorted(backends, key=lambda backend: str(backend.get("id", "")))
    return tuple(_file(monitor, process, backend, memfd=memfd) for backend in backends)


def names(monitor: Commands) -> set[str]:
    """Return the names of a guest's memory backends. Raises HypervisorError."""
    return {str(one.get("id", "")) for one in monitor.ask("query-memdev")}


def replugged(monitor: Commands) -> CannotCapture:
    """Return the error for memory that was plugged in or unplugged during a capture."""
    return CannotCapture(
        f"{monitor.name} on {monitor.host}: memory was plugged in or unplugged during the capture",
        hint="take the snapshot again",
    )


def _file(
    monitor: Commands, process: HeldProcess, backend: dict[str, Any], *, memfd: bool
) -> MemoryFile:
    name = str(backend.get("id", ""))
    path = f"/objects/{name}"
    kind = str(monitor.ask("qom-get", path=path, property="type"))
    if kind == _MEMFD and memfd and backend.get("share"):
        found = _memfd(monitor, process.pid, name, int(backend["size"]))
        if found is None:
            raise _cannot(monitor, f"the memfd of its memory {name!r}", "is not mapped by QEMU")
        return MemoryFile((name, path), int(backend["size"]), found, process)
    if kind != _FILE:
        raise _cannot(monitor, f"its memory {name!r}", _REASONS.get(kind, f"is a {kind}"))
    if not backend.get("share"):
        raise _cannot(monitor, f"its memory {name!r}", "is a file, but not shared")
    size = int(backend["size"])
    try:
        opened = _mapped(
            process.pid, size, str(monitor.ask("qom-get", path=path, property="mem-path"))
        )
    except OSError as exc:
        raise _cannot(
            monitor, f"the backing file of its memory {name!r}", f"cannot be read: {exc}"
        ) from exc
    if opened is None:
        raise _cannot(monitor, f"the backing file of its memory {name!r}", "is not mapped by QEMU")
    kind = file_system(Path(f"/proc/{process.pid}/mountinfo").read_text(), opened.stat().st_dev)
    if kind != "tmpfs":
        raise _cannot(
            monitor, f"its memory {name!r}", f"is a file on {kind}, but must be on tmpfs",
            hint="set memory_backing_dir in qemu.conf to a directory on tmpfs; restart the guest",
        )  # fmt: skip
    return MemoryFile((name, f"/objects/{name}"), size, opened, process)


def _cannot(monitor: Commands, what: str, why: str, *, hint: str = _PREPARE) -> CannotCapture:
    return CannotCapture(f"{monitor.name} on {monitor.host}: {what} {why}", hint=hint)


def _memfd(monitor: Commands, process: int, name: str, size: int) -> Path | None:
    """Find the mapping of a backend's memfd. Returns its path in /proc; None: not found.

    `process`: QEMU's process ID; `name`: the backend's memory block; `size`: its size in bytes.
    Other backends may have memfds of the same size and name; then the address decides.
    """
    found = [one for one, path in _mappings(process, size) if path.startswith("/memfd:")]
    if len(found) > 1:
        start = ram_blocks.address(monitor, name)
        found = [one for one in found if start == int(one.name.partition("-")[0], 16)]
    return found[0] if len(found) == 1 else None


def _mapped(process: int, size: int, path: str) -> Path | None:
    """Find the process's mapping of `size` bytes whose file is, or was, at or below `path`.

    Returns the mapping's path in /proc; None if there is no such mapping.
    """
    below = f"{path.rstrip('/')}/"
    found = [one for one, file in _mappings(process, size) if f"{file}/".startswith(below)]
    return found[-1] if found else None


def _mappings(process: int, size: int) -> Iterator[tuple[Path, str]]:
    """Yield each shared, writable mapping of `size` bytes: its path in /proc, and its file's."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        # Only mappings that QEMU can write to are used, so that our writes give QEMU no new access.
        if len(words) < 6 or not words[1].startswith("rw") or "s" not in words[1]:
            continue
        start, end = (int(word, 16) for word in words[0].split("-"))
        if end - start == size:
            yield Path(f"/proc/{process}/map_files/{words[0]}"), words[5].removesuffix(" (deleted)")


def shared_file(maps: str, process: HeldProcess, one: MemoryRange) -> MemoryFile | None:
    """Return the file that QEMU has mapped at a range; None if the range is private to QEMU.

    `maps`: the text of /proc/PID/maps. QEMU must have mapped the file from its start.
    """
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in words[0].split("-"))
        if start == one.start and end == one.start + one.size and "s" in words[1]:
            path = Path(f"/proc/{process.pid}/map_files/{words[0]}")
            return MemoryFile((), one.size, path, process)
    return None


def file_system(mountinfo: str, device: int) -> str:
    """Return the type of the file system with a device number, from /proc/PID/mountinfo.

    Returns "an unknown file system" if the device is not listed.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        words = line.split()
        if len(words) > 6 and words[2] == wanted:
            return words[words.index("-") + 1]
    return "an unknown file system"


def start_time(process: int) -> str:
    """Return a process's start time in clock ticks, which shows whether its ID was reused.

    Raises OSError.
    """
    text = Path(f"/proc/{process}/stat").read_text()
    return text.rpartition(")")[2].split()[19]


_NAME = re.compile(r"[0-9a-f-]{36}-(\d+)-(\d+)")
_LOCK, _MARK = ".lock", ".watched"
# tail checks every second that the process exists; an agent that stores the copy holds the lock.
_WAIT = 'tail --pid="$0" -f /dev/null; exec flock "$1.lock" rm -rf "$1" "$1.watched" "$1.lock"'
_MEMORY = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


def root() -> Path:
    """Return the directory of all copies.

    Raises RemoteError if other users could write to it, and OSError.
    """
    return host_directories.memory_dir("snapshots")


def place(guest: str, process: int) -> Path:
    """Return the directory of the last copy for a guest's QEMU process.

    `guest`: a UUID. The directory's lock is the file with the same path and the suffix `.lock`.
    Raises RemoteError, OSError.
    """
    return root() / f"{guest}-{process}-{start_time(process)}"


def room() -> Bytes:
    """Return the space for a new copy: free space on the tmpfs, at most the available memory.

    Raises OSError.
    """
    stat = os.statvfs(host_directories.SHM)
    return Bytes(min(stat.f_bavail * stat.f_frsize, available()))


def available() -> Bytes:
    """Return the bytes of available memory on the host; 0 if unknown. Raises OSError."""
    found = _MEMORY.search(Path("/proc/meminfo").read_text())
    return Bytes(int(found[1]) << 10 if found else 0)


def watch(folder: Path, process: int) -> None:
    """Start a process that removes a directory once a QEMU process has ended.

    Does nothing if such a process is already running. Raises OSError.
    """
    mark = folder.with_suffix(_MARK)
    with suppress(OSError, ValueError):
        if b"--pid=" in Path(f"/proc/{int(mark.read_text())}/cmdline").read_bytes():
            return
    # The new process outlives this process, which only waits for the shell that starts it.
    waiting = ["setsid", "sh", "-c", _WAIT, str(process), str(folder)]
    script = '"$0" "$@" </dev/null >/dev/null 2>&1 & echo $!'
    told = subprocess.run(["sh", "-c", script, *waiting], cwd="/", capture_output=True, check=False)
    mark.write_bytes(told.stdout)


def drop(guest: str) -> None:
    """Remove all copies of a guest's memory. Raises RemoteError, OSError."""
    for folder in root().glob(f"{guest}-*-*"):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove all copies whose QEMU has ended, except copies that an agent is still storing.

    Raises RemoteError.
    """
    with suppress(OSError):
        for folder in root().iterdir():
            found = _NAME.fullmatch(folder.name)
            if found is not None and not lives(int(found[1]), found[2]):
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


def lives(process: int, started: str) -> bool:
    """Return whether a process with this start time is still alive; see `start_time`."""
    try:
        return start_time(process) == started
    except (OSError, IndexError):
        return False
