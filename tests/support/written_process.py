"""A process with memory of its own, which writes the pages that it is asked to."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_PROGRAM = """
import ctypes, mmap, os, random, sys, time
size, huge = int(sys.argv[1]), sys.argv[2] == "huge"
if sys.argv[2] == "shared":
    file = os.memfd_create("memory")
    os.ftruncate(file, size)
    memory = mmap.mmap(file, size)
else:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
zeros = open("/dev/zero", "rb", buffering=0)
print(address, flush=True)
library = ctypes.CDLL(None, use_errno=True)
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
library.mmap.restype = ctypes.c_void_p
for line in sys.stdin:
    word, *pages = line.split()
    for page in map(int, pages):
        if word == "write":
            memory[4096 * page] = (memory[4096 * page] + 1) % 256
        if word == "read":
            print(memory[4096 * page])
        if word == "allocate":
            os.posix_fallocate(file, 4096 * page, 4096)
        if word == "load":
            zeros.readinto(memoryview(memory)[4096 * page : 4096 * page + 4096])
        if word == "spin":  # write each page once, in any order, within so many milliseconds
            order, began = random.sample(range(size // 4096), size // 4096), time.monotonic()
            for number, one in enumerate(order):
                while (time.monotonic() - began) * 1000 * len(order) < page * number:
                    pass
                memory[4096 * one] = (memory[4096 * one] + 1) % 256
        if word == "map":  # anew, at the same address
            assert library.mmap(address, size, 3, 0x32, -1, 0) == address
    print("done", flush=True)
"""
_PROTECTED = 1 << 57


class WrittenProcess:
    """The process, with `pages` pages. Use as `with WrittenProcess() as process`."""

    def __init__(self, pages: int = 256, *, huge: bool = False, shared: bool = False) -> None:
        kind = "shared" if shared else "huge" if huge else "small"
        words = [sys.executable, "-c", _PROGRAM, str(pages * 4096), kind]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.range = MemoryRange(int(self._process.stdout.readline()), pages * 4096)
        self.held = HeldProcess(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
        self._process.kill()
        self._process.communicate()

    def write(self, pages: Iterable[int]) -> None:
        """Change a byte of each of these pages."""
        self._do("write", pages)

    def read(self, pages: Iterable[int]) -> list[int]:
        """Return the first byte of each page, as the process reads it. Waits for faults."""
        pages = list(pages)
        self._ask("read", pages)
        assert self._process.stdout is not None
        found = [int(self._process.stdout.readline()) for _ in pages]
        self._wait()
        return found

    def load(self, pages: Iterable[int]) -> None:
        """Let the kernel read zeros into these pages."""
        self._do("load", pages)

    def allocate(self, pages: Iterable[int]) -> None:
        """Allocate these pages of the shared memory's file, without writing them."""
        self._do("allocate", pages)

    def spin(self, milliseconds: int) -> None:
        """Write each page once, in any order, within this time. Does not wait for the end."""
        self._ask("spin", [milliseconds])

    def wait(self) -> None:
        """Wait for the end of `spin`."""
        self._wait()

    def map_again(self) -> None:
        """Replace the memory by other memory at the same address."""
        self._do("map", [0])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def protected(self) -> int:
        """How many pages are protected by a userfaultfd; 0: none is left behind."""
        file = os.open(f"/proc/{self.held.pid}/pagemap", os.O_RDONLY)
        try:
            entries = os.pread(file, self.range.size // 512, self.range.start // 512)
        finally:
            os.close(file)
        both = (entries[at : at + 8] for at in range(0, len(entries), 8))
        return sum(bool(int.from_bytes(one, "little") & _PROTECTED) for one in both)

    def watched(self) -> bool:
        """Whether some mapping is registered with a userfaultfd."""
        smaps = Path(f"/proc/{self.held.pid}/smaps").read_text()
        flags = (line.split() for line in smaps.splitlines() if line.startswith("VmFlags:"))
        return any("uw" in one for one in flags)

    def _do(self, word: str, pages: Iterable[int]) -> None:
        self._ask(word, pages)
        self._wait()

    def _ask(self, word: str, pages: Iterable[int]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {' '.join(map(str, pages))}\n")
        self._process.stdin.flush()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"
