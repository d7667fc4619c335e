"""Unblock a guest whose writes wait for a background snapshot that has failed.

When such a snapshot fails or is cancelled, QEMU 7.2 keeps the guest's memory write-protected, and
the guest hangs forever at its next write. The protection belongs to a file descriptor of QEMU that
a privileged process on the host can use as well.
"""

import fcntl
import os
import re
import struct
from contextlib import suppress
from pathlib import Path

from vmckpt.hypervisor.qemu_process import userfaultfd
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_UNREGISTER = 0x8010AA01
_WRITEPROTECT = 0xC018AA06
# The flag in VmFlags of memory that is write-protected by a userfaultfd.
_WATCHED = "uw"
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def watched(smaps: str) -> list[tuple[int, int]]:
    """Return start and length of each write-protected range of memory, from /proc/PID/smaps."""
    found, current = [], None
    for line in smaps.splitlines():
        if (match := _RANGE.match(line)) is not None:
            current = int(match[1], 16), int(match[2], 16) - int(match[1], 16)
        elif line.startswith("VmFlags:") and _WATCHED in line.split() and current is not None:
            found.append(current)
    return found


def free(process: HeldProcess) -> int:
    """Remove the write protection of a process's memory. Returns how many ranges had it.

    Do not call this while a snapshot is running. Raises OSError, also if permission is denied.
    """
    ranges = watched(Path(f"/proc/{process.pid}/smaps").read_text())
    if not ranges:
        return 0
    files = [userfaultfd.duplicate(process, one) for one in userfaultfd.opened(process)]
    if not files:
        raise OSError(f"process {process.pid} no longer has a userfaultfd")
    left = set(ranges)
    try:
        for file in files:
            for start, length in ranges:
                with suppress(OSError):
                    fcntl.ioctl(file, _WRITEPROTECT, struct.pack("=QQQ", start, length, 0))
                with suppress(OSError):  # the range belongs to another file
                    fcntl.ioctl(file, _UNREGISTER, struct.pack("=QQ", start, length))
                    left.discard((start, length))
    finally:
        for file in files:
            os.close(file)
    if left:
        raise OSError(f"{len(left)} ranges of process {process.pid} are still write-protected")
    return len(ranges)
