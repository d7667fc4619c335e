"""A scratch guest: QEMU with a program of a few bytes in place of firmware, without libvirt.

Features that may not work on a host are tested on a scratch guest, never on a user's guest. The
program runs in 16-bit mode, which works even with a /dev/kvm that cannot run an ordinary kernel.
The program increments counters at 0x600 and in 128 pages starting at 0x10000. QEMU is killed when
this process ends, and leaves no files: the memory file is unlinked.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.errors import HypervisorError

SIZE = 4 << 20
COUNTER = 0x600
PAGES = 128
_SHM = "/dev/shm"
QEMU = "qemu-system-x86_64"
_PROGRAM = bytes.fromhex(
    "fa31c08ed8"  # cli; ds = 0
    "66ff060006"  # inc dword [0x600]
    "bb0010"  # bx = 0x1000
    "8ec3"  # es = bx
    "2666ff060000"  # inc dword es:[0]
    "81c30001"  # bx += 0x100, a page
    "81fb0090"  # bx < 0x9000?
    "72ee"  # then continue with es = bx
    "ebe4"  # otherwise count again
)
_RESET = bytes.fromhex("ea000000f0").ljust(16, b"\0")
_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class Scratch:
    """A scratch guest that runs inside the block. Use as `with Scratch() as guest`.

    The class implements `capture.migration_settings.Commands`. Entering the block raises OSError if
    the QEMU binary does not exist, and HypervisorError if QEMU does not start, for example without
    the accelerator.
    """

    host, uri, name = "here", "", "scratch guest"
    guest = "00000000-0000-0000-0000-000000000001"

    def __init__(
        self, *, waits: bool = False, accelerator: str = "kvm", qemu: str = QEMU,
        more: Sequence[str] = (), private: bool = False, size: int = SIZE,
        program: bytes = _PROGRAM,
    ) -> None:  # fmt: skip
        """`waits`: the guest waits for device state, as a standby does. `more`: further arguments
        of QEMU. `private`: its memory is no file, so that `file` and `memory` are not its own.
        `size`: of its memory, in bytes. `program`: its program."""
        self.size, self._program = size, program
        self._waits, self._accelerator, self._qemu = waits, accelerator, qemu
        self._more, self._private = more, private
        self._last_words = ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        ends = _WITH_US if shutil.which(_WITH_US[0]) else ()
        with tempfile.TemporaryDirectory(dir=_SHM, prefix="vmckpt-scratch-") as name, theirs:
            rom, ram = Path(name) / "rom", Path(name) / "ram"
            rom.write_bytes(self._program.ljust(0xFFF0, b"\0") + _RESET)
            self._process = subprocess.Popen(
                [*ends, self._qemu, "-accel", self._accelerator,
                 "-machine", "pc,memory-backend=pc.ram", "-m", f"{self.size}B",
                 "-nodefaults", "-display", "none", "-vga", "none", "-bios", str(rom),
                 "-object", self._backend(ram), *self._more,
                 "-chardev", f"socket,id=qmp,fd={theirs.fileno()}",
                 "-mon", "chardev=qmp,mode=control",
                 *(("-S", "-incoming", "defer") if self._waits else ())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            theirs.close()
            self._socket = ours
            self._socket.settimeout(10.0)
            self._lines = ours.makefile("rb")
            try:
                if not self._lines.readline():
                    raise HypervisorError(f"QEMU did not start: {self._said()}", host=self.host)
                self.ask("qmp_capabilities")
                self.file = os.open(ram, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
                os.ftruncate(self.file, self.size)
            except BaseException:
                self._kill()
                raise
        self.memory = Mapping(self.file, self.size, write=True)
        return self

    def _backend(self, ram: Path) -> str:
        if self._private:
            return f"memory-backend-ram,id=pc.ram,size={self.size}B"
        return f"memory-backend-file,id=pc.ram,size={self.size}B,mem-path={ram},share=on"

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        os.close(self.file)
        self._kill()

    def _kill(self) -> None:
        self._said()
        with suppress(OSError):
            self._lines.close()
        self._socket.close()

    def _said(self) -> str:
        """Kill QEMU and return the last line of its error output."""
        self._process.kill()
        if self._process.stderr is not None and not self._process.stderr.closed:
            said = self._process.communicate()[1].decode(errors="replace").splitlines()
            self._last_words = said[-1].strip() if said else ""
        return self._last_words

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self._process.pid

    @property
    def files(self) -> tuple[MemoryFile, ...]:
        """The guest's memory, as `memory_files.files` returns it."""
        return (MemoryFile(("pc.ram",), self.size, Path(f"/proc/self/fd/{self.file}")),)

    def count(self) -> int:
        """Return the program's counter."""
        return int.from_bytes(os.pread(self.file, 4, COUNTER), "little")

    def goes_on(self, limit: float = 3.0) -> bool:
        """Return whether the program is counting. Waits at most `limit` seconds for a change."""
        before, give_up = self.count(), time.monotonic() + limit
        while self.count() == before and time.monotonic() < give_up:
            time.sleep(0.005)
        return self.count() != before

    def ask(self, command: str, **arguments: object) -> Any:
        """Run a QMP command and return its answer. Raises HypervisorError."""
        return self.tell(command, arguments)

    def tell(
        self, command: str, arguments: dict[str, object], *, files: tuple[int, ...] = ()
    ) -> Any:
        """Run a QMP command with open `files` and return the answer. Raises HypervisorError."""
        order = json.dumps({"execute": command, "arguments": arguments}).encode()
        try:
            socket.send_fds(self._socket, [order], list(files))
        except OSError as exc:
            raise HypervisorError(f"{command}: QEMU is gone: {exc}", host=self.host) from exc
        while line := self._line(command):
            told = json.loads(line)
            if "event" in told:
                self.events.append(told)
                continue
            if "error" in told:
                raise HypervisorError(f"{command}: {told['error']['desc']}", host=self.host)
            return told["return"]
        raise HypervisorError(f"{command}: QEMU is gone: {self._said()}", host=self.host)

    def _line(self, command: str) -> bytes:
        try:
            return self._lines.readline()
        except OSError as exc:
            raise HypervisorError(f"{command}: no reply: {exc}", host=self.host) from exc

    def run_state(self) -> str:
        """Return the guest's run state, as QEMU names it."""
        return str(self.ask("query-status")["status"])

    def paused_by_user(self) -> bool:
        """Return False: the guest does not exist in libvirt, so no user can pause it."""
        return False
