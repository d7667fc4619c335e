"""The files that hold a guest's shared memory: asked from QEMU, found in its process, and checked.

Only files on tmpfs are taken. Where memory is something else, the refusal says what and why.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.checkpoint.settings import Commands
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_PREPARE = "run vmckpt prepare, or use another way of capture"
_REASONS = {
    "memory-backend-ram": "is private to QEMU",
    "memory-backend-memfd": "is a memfd, which QEMU versions treat differently in a capture",
}
_FILE = "memory-backend-file"


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """One file with memory of the guest."""

    names: tuple[str, ...]
    """What QEMU may call the block."""
    size: int
    path: Path
    """Under which it can be opened from outside QEMU's mount namespace."""
    qemu: HeldProcess | None = None
    """Through which that path leads; None: the file is our own."""

    def open(self, flags: int) -> int:
        """Open it as `os.open` does. Raises OSError, also if QEMU has ended: its ID may be another
        process's by now."""
        opened = os.open(self.path, flags | os.O_CLOEXEC)
        if self.qemu is not None and not self.qemu.lives():
            os.close(opened)
            raise ProcessLookupError(f"QEMU, process {self.qemu.pid}, has ended")
        return opened


def files(monitor: Commands, process: HeldProcess) -> tuple[MemoryFile, ...]:
    """All of a guest's memory as files, to be opened while `process` is held.

    Raises CannotCapture with the reason, HypervisorError.
    """
    backends: list[dict[str, Any]] = monitor.ask("query-memdev")
    if not backends:
        raise _cannot(monitor, "its memory", _REASONS["memory-backend-ram"])
    return tuple(_file(monitor, process, backend) for backend in backends)


def _file(monitor: Commands, process: HeldProcess, backend: dict[str, Any]) -> MemoryFile:
    name = str(backend.get("id", ""))
    path = f"/objects/{name}"
    kind = str(monitor.ask("qom-get", path=path, property="type"))
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
            monitor, f"the file of its memory {name!r}", f"cannot be read: {exc}"
        ) from exc
    if opened is None:
        raise _cannot(monitor, f"the file of its memory {name!r}", "is not mapped by QEMU")
    kind = file_system(Path(f"/proc/{process.pid}/mountinfo").read_text(), opened.stat().st_dev)
    if kind != "tmpfs":
        raise _cannot(
            monitor, f"its memory {name!r}", f"is a file on {kind}, and must be on tmpfs",
            mend="set memory_backing_dir in qemu.conf to a folder on tmpfs and restart the guest",
        )  # fmt: skip
    return MemoryFile((name, f"/objects/{name}"), size, opened, process)


def _cannot(monitor: Commands, what: str, why: str, *, mend: str = _PREPARE) -> CannotCapture:
    return CannotCapture(f"{monitor.name} on {monitor.host}: {what} {why}", mend=mend)


def _mapped(process: int, size: int, path: str) -> Path | None:
    """The mapping of that size whose file is or was at, or in, that path; as a file to open."""
    best = None
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        # QEMU can write to what it maps as writable, so our writing there gives it nothing new.
        if len(words) < 6 or not words[1].startswith("rw") or "s" not in words[1]:
            continue
        start, end = (int(word, 16) for word in words[0].split("-"))
        if end - start == size and words[5].removesuffix(" (deleted)").startswith(path):
            best = Path(f"/proc/{process}/map_files/{words[0]}")
    return best


def file_system(mountinfo: str, device: int) -> str:
    """The kind of the file system with that device number, from /proc/PID/mountinfo."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        words = line.split()
        if len(words) > 6 and words[2] == wanted:
            return words[words.index("-") + 1]
    return "an unknown file system"


def started(process: int) -> str:
    """When a process began, in the kernel's own count: tells it from a later one of that number."""
    text = Path(f"/proc/{process}/stat").read_text()
    return text.rpartition(")")[2].split()[19]
