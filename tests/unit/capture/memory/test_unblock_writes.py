"""Freeing a process whose writes wait for somebody who is gone."""

import subprocess
import sys

from vmckpt.capture.memory import unblock_writes
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

SMAPS = """7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
VmFlags: rd wr mr mw me ac uw sd
7f0000400000-7f0000600000 rw-p 00000000 00:00 0                          [heap]
VmFlags: rd wr mr mw me ac sd
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
VmFlags: ex uw
"""

# Protects two pages of its own, and writes to one: as QEMU does whose snapshot broke off.
HANGING = """
import ctypes, fcntl, mmap, struct
memory = mmap.mmap(-1, 8192)
memory[:] = bytes([1]) * 8192
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
file = ctypes.CDLL(None).syscall(323, 0o2000000)
assert file >= 0
fcntl.ioctl(file, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
fcntl.ioctl(file, 0xC020AA00, bytearray(struct.pack("QQQQ", address, 8192, 2, 0)))
fcntl.ioctl(file, 0xC018AA06, bytearray(struct.pack("QQQ", address, 8192, 1)))
print("hangs", flush=True)
memory[0] = 2
print("free", flush=True)
input()
"""


def test_watched_memory_is_told_by_its_flags() -> None:
    assert unblock_writes.watched(SMAPS) == [
        (0x7F0000000000, 0x400000),
        (0xFFFFFFFFFF600000, 0x1000),
    ]
    assert unblock_writes.watched("") == []


def test_a_hanging_process_is_freed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "hangs\n"
            with HeldProcess(process.pid) as held:
                assert unblock_writes.free(held) == 1
                assert process.stdout.readline() == "free\n"
                assert unblock_writes.free(held) == 0
        finally:
            process.kill()
