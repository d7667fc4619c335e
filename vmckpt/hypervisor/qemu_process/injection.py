"""Make system calls in the context of another process's main thread, with ptrace(2).

QEMU keeps running even if the tracer dies. The tracer sets QEMU's registers only to enter a detour
that returns by itself: the system call, then rt_sigreturn(2) with a frame of the original
registers. If the tracer is killed at any moment, the process therefore continues as after a signal.

The thread must be waiting in a system call, as QEMU's main thread nearly always is. That call is
interrupted, and the kernel restarts it afterwards. This works only on x86-64.
"""

import ctypes
import os
import platform
import re
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Seconds

T = TypeVar("T")

LIMIT = Seconds(1.0)
"""Time within which a thread must stop. A thread waiting in poll(2) stops in less than 1 ms."""
SCRATCH = 2048
"""Bytes of memory for the arguments of a call."""
_SEIZE, _INTERRUPT, _DETACH, _CONT, _SYSCALL = 0x4206, 0x4207, 17, 7, 24
_GETREGS, _SETREGS = 12, 13
_MARK_SYSCALLS = 1  # PTRACE_O_TRACESYSGOOD
_WALL = 0x40000000
_EVENT_STOP = 128
_AT_SYSCALL, _EINTR = 5 | 0x80, 4
_NO_CALL = (1 << 64) - 1
_CALL, _CALL_RET = b"\x0f\x05", b"\x0f\x05\xc3"
# mov $15, %rax; syscall: the return from a signal handler in glibc and musl.
_SIGRETURN = re.compile(rb"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05|\xb8\x0f\x00\x00\x00\x0f\x05")
_RED_ZONE = 128
_NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx",
    "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es",
    "fs", "gs",
)  # fmt: skip
_IN_FRAME = (
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax",
    "rcx", "rsp", "rip", "eflags",
)  # fmt: skip
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
# UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
_FRAME_FLAGS = 6


class Why(Enum):
    """Why a call could not be made."""

    UNSUPPORTED = "not supported"
    REFUSED = "the kernel does not permit tracing it"
    BUSY = "its main thread is not waiting in a system call"
    HANGS = "its main thread does not stop; it may be waiting for storage"
    ENDED = "it has ended"


class CannotInject(VmckptError):
    """No call was made; the process runs as before."""

    exit_code = 10

    def __init__(self, process: int, why: Why, detail: str = "") -> None:
        super().__init__(f"process {process}: {why.value}{detail and f': {detail}'}")
        self.why = why


class Registers(ctypes.Structure):
    """`struct user_regs_struct` of x86-64."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in _NAMES)


@dataclass(frozen=True, slots=True)
class Gadgets:
    """Addresses of the instructions in the process that form the detour."""

    call: int
    """A `syscall` and a `ret` instruction."""
    back: int
    """The instructions that call rt_sigreturn(2)."""


def frame(registers: Registers, blocked: int) -> bytes:
    """Return the frame for rt_sigreturn(2): `struct rt_sigframe` without its return address.

    `blocked`: the mask of blocked signals. The interrupted call returns EINTR. The frame has no
    floating point registers: a thread in a system call does not need them.
    """
    values = {name: getattr(registers, name) for name in _IN_FRAME}
    values["rax"] = -_EINTR & _NO_CALL
    context = struct.pack("<18Q", *(values[name] for name in _IN_FRAME))
    segments = struct.pack(
        "<4H", registers.cs & 0xFFFF, registers.gs & 0xFFFF, registers.fs & 0xFFFF,
        registers.ss & 0xFFFF,
    )  # fmt: skip
    # err, trapno, oldmask, cr2, no floating point, reserved
    context += segments + bytes(4 * 8) + bytes(8) + bytes(8 * 8)
    head = struct.pack("<QQQiiQ", _FRAME_FLAGS, 0, 0, 0, 0, 0)
    return head + context + struct.pack("<Q", blocked)


class Stopped:
    """A thread stopped in a system call. Valid only inside `run`."""

    def __init__(self, tracer: "_Tracer", registers: Registers) -> None:
        self._tracer = tracer
        self._registers = registers
        self.scratch = _scratch(tracer.pid, registers.rsp)
        """Address of SCRATCH bytes that are unused until the thread runs again."""

    def write(self, content: bytes) -> None:
        """Write a call's arguments to the scratch bytes. Raises ValueError if they do not fit."""
        if len(content) > SCRATCH:
            raise ValueError("too large for the scratch bytes")
        self._tracer.write(self.scratch, content)

    def read(self, length: int, at: int = 0) -> bytes:
        """Read a call's output from the scratch bytes, at offset `at`."""
        return self._tracer.read(self.scratch + at, length)

    def call(self, number: int, *arguments: int) -> int:
        """Make a system call and return its result. Raises OSError if it failed."""
        result = self._tracer.step(self._registers, self.scratch, number, arguments)
        if -4096 < result < 0:
            raise OSError(-result, os.strerror(-result))
        return result


def run(process: HeldProcess, work: Callable[[Stopped], T], limit: Seconds = LIMIT) -> T:
    """Stop the process's main thread, run `work`, and let the thread continue.

    `work` may make several calls. Returns the result of `work`. `limit`: time for stopping the
    thread and for all calls, in seconds. Raises CannotInject, and any error from `work`.
    """
    if platform.machine() != "x86_64":
        raise CannotInject(process.pid, Why.UNSUPPORTED, f"CPU architecture {platform.machine()}")
    # A thread of its own does the tracing: when it ends, the kernel detaches it from the process.
    done: list[T] = []
    failed: list[BaseException] = []

    def trace() -> None:
        try:
            done.append(_Tracer(process, limit).run(work))
        except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
            failed.append(exc)

    thread = threading.Thread(target=trace, name="tracer")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


class _Tracer:
    """Traces a process from the current thread. The kernel detaches it when the thread ends."""

    def __init__(self, process: HeldProcess, limit: Seconds) -> None:
        self.pid = process.pid
        self._process = process
        self._until = time.monotonic() + limit
        self._signals: list[int] = []
        """Signals that arrived while the process was stopped, to be delivered to it later."""
        self._stopped = False
        """Whether the process has stopped at least once."""

    def run(self, work: Callable[[Stopped], T]) -> T:
        while True:
            registers = self._stop()
            if self._in_call(registers):
                break
            self._let_go()
            if time.monotonic() > self._until:
                raise CannotInject(self.pid, Why.BUSY)
            time.sleep(0.0002)
        try:
            stopped = Stopped(self, registers)
            return work(stopped)
        finally:
            with suppress(OSError):  # the thread is in the detour, which returns, or has ended
                # With the old registers, the kernel restarts the interrupted call.
                _ptrace(_SETREGS, self.pid, ctypes.addressof(registers))
                self._let_go()

    def _stop(self) -> Registers:
        self._seize()
        if not self._process.lives():
            raise CannotInject(self.pid, Why.ENDED)
        _ptrace(_INTERRUPT, self.pid, 0)
        self._wait()
        return self._registers()

    def _seize(self) -> None:
        while True:
            try:
                _ptrace(_SEIZE, self.pid, _MARK_SYSCALLS)
            except ProcessLookupError as exc:
                raise CannotInject(self.pid, Why.ENDED) from exc
            except PermissionError as exc:
                # Another vmckpt process may be tracing it for a moment.
                if time.monotonic() > self._until:
                    raise CannotInject(self.pid, Why.REFUSED, str(exc.strerror)) from exc
            else:
                return
            time.sleep(0.001)

    def _wait(self) -> int:
        """Wait until the process stops, and return the reason. Keeps signals that arrive."""
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG | _WALL)
            if found:
                break
            if time.monotonic() > self._until:
                raise CannotInject(self.pid, Why.BUSY if self._stopped else Why.HANGS)
            time.sleep(0.00005)
        self._stopped = True
        if not os.WIFSTOPPED(status):
            raise CannotInject(self.pid, Why.ENDED)
        if status >> 16 == _EVENT_STOP:
            return _EVENT_STOP
        signal = os.WSTOPSIG(status)
        if signal != _AT_SYSCALL:
            self._signals.append(signal)
        return signal

    def _registers(self) -> Registers:
        registers = Registers()
        _ptrace(_GETREGS, self.pid, ctypes.addressof(registers))
        return registers

    def _in_call(self, registers: Registers) -> bool:
        return (
            ctypes.c_longlong(registers.orig_rax).value >= 0
            and self.read(registers.rip - len(_CALL), len(_CALL)) == _CALL
        )

    def step(self, before: Registers, scratch: int, number: int, arguments: tuple[int, ...]) -> int:
        """Run the detour up to the end of its system call, and return the call's result."""
        gadgets = _gadgets(self.pid, _identity(self.pid))
        at = scratch - 1024 & ~15
        self.write(at, struct.pack("<Q", gadgets.back) + frame(before, _blocked(self.pid)))
        call = Registers.from_buffer_copy(before)
        call.rip, call.rsp, call.rax, call.orig_rax = gadgets.call, at, number, _NO_CALL
        for name, value in zip(_ARGUMENTS, arguments, strict=False):
            setattr(call, name, value)
        _ptrace(_SETREGS, self.pid, ctypes.addressof(call))
        # Single-stepping is unsafe: if the tracer died, the trap flag would kill the process.
        self._go_on(_SYSCALL, _AT_SYSCALL)
        self._go_on(_SYSCALL, _AT_SYSCALL)
        result = ctypes.c_longlong(self._registers().rax).value
        # Leave the call and stop where the thread was stopped before.
        _ptrace(_INTERRUPT, self.pid, 0)
        self._go_on(_CONT, _EVENT_STOP)
        return result

    def _go_on(self, how: int, until: int) -> None:
        while True:
            _ptrace(how, self.pid, 0)
            if self._wait() == until:
                return

    def _let_go(self) -> None:
        for signal in self._signals:
            os.kill(self.pid, signal)
        self._signals = []
        _ptrace(_DETACH, self.pid, 0)

    def read(self, address: int, length: int) -> bytes:
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)

    def write(self, address: int, content: bytes) -> None:
        with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(content)


def _ptrace(request: int, pid: int, data: int) -> None:
    library = _library()
    if library.ptrace(request, pid, 0, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.restype = ctypes.c_long
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _identity(pid: int) -> str:
    """Return the process's start time, which differs from that of a later process with this ID."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@lru_cache(maxsize=64)
def _gadgets(pid: int, started: str) -> Gadgets:
    """Find the instructions in the process's C library. Raises CannotInject.

    `started` keeps a cached result from being used for a later process with the same ID.
    """
    del started
    call = back = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in _executable(pid):
            memory.seek(start)
            text = memory.read(end - start)
            if not call and (found := text.find(_CALL_RET)) >= 0:
                call = start + found
            if not back and (match := _SIGRETURN.search(text)):
                back = start + match.start()
            if call and back:
                return Gadgets(call=call, back=back)
    raise CannotInject(pid, Why.UNSUPPORTED, "unknown C library")


def _executable(pid: int) -> list[tuple[int, int]]:
    """Return the executable mappings of the C library, as start and end address."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if "x" in words[1] and len(words) == 6 and re.search(r"/(libc|ld-musl)[-.]", words[5]):
            start, end = (int(one, 16) for one in words[0].split("-"))
            found.append((start, end))
    return found


def _blocked(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(one for one in status.splitlines() if one.startswith("SigBlk:")).split()[1], 16)


def _scratch(pid: int, stack: int) -> int:
    """Return an address below the red zone, within the stack's mapping. Raises CannotInject."""
    address = stack - _RED_ZONE - SCRATCH & ~15
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        start, end = (int(one, 16) for one in words[0].split("-"))
        if start <= address - 2048 and address + SCRATCH <= end and words[1].startswith("rw"):
            return address
    raise CannotInject(pid, Why.UNSUPPORTED, "no writable memory below its stack pointer")
