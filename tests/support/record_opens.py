"""Print which files the QEMU processes of a host open. Runs on the host, as a program.

For each opened file a line of JSON: the guest, the path, and whether the file was open for writing.
Ends at the end of stdin.
"""

import ctypes
import json
import os
import select
import struct
import sys
from pathlib import Path

_NOTIFY, _CLOEXEC, _UNLIMITED = 0x0, 0x1, 0x10
_ADD, _FILESYSTEM = 0x1, 0x100
_OPEN, _CLOSE_WRITE = 0x20, 0x8
_EVENT = struct.Struct("=IBBHQii")
_WHERE_FILES_ARE = {"ext4", "xfs", "btrfs", "overlay", "tmpfs", "ext3", "ext2"}


def marked() -> int:
    """Return a descriptor that reports all opened files of this mount namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    listener = libc.fanotify_init(_NOTIFY | _CLOEXEC | _UNLIMITED, os.O_RDONLY)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "fanotify_init")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in _WHERE_FILES_ARE:
            place = before.split()[4].encode().decode("unicode_escape").encode()
            mask = ctypes.c_uint64(_OPEN | _CLOSE_WRITE)
            # A mount that another one hides cannot be marked, and nothing is opened there.
            libc.fanotify_mark(listener, _ADD | _FILESYSTEM, mask, -100, place)
    return int(listener)


def guest_of(pid: int) -> str:
    """The name of the guest of a QEMU process; empty for other processes."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "qemu-system" not in words[0] or "-name" not in words:
        return ""
    return words[words.index("-name") + 1].split(",")[0].removeprefix("guest=")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    listener = marked()
    say("ready")
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if listener in ready:
            data = os.read(listener, 1 << 16)
            while data:
                length, _, _, _, mask, file, pid = _EVENT.unpack_from(data)
                path = Path(f"/proc/self/fd/{file}").readlink()
                os.close(file)
                if guest := guest_of(pid):
                    name = str(path).removesuffix(" (deleted)")
                    told = {"guest": guest, "path": name, "writes": bool(mask & _CLOSE_WRITE)}
                    say(json.dumps(told))
                data = data[length:]
        elif not os.read(0, 1):
            return


if __name__ == "__main__":
    main()
