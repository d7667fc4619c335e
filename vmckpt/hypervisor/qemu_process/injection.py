"""Make system calls in the context of another process's main thread, with ptrace(2).

QEMU keeps running even if the tracer dies. The tracer sets QEMU's registers only to enter a detour
that returns by itself: the system call, then rt_sigreturn(2) with a frame of the original
registers. If the tracer is killed at any moment, the process therefore continues as after a signal.

The thread must be waiting in a system call, as QEMU's main thread nearly always is. That call is
interrupted, and the kernel restarts it afterwards. See `architecture` for the processors that are
supported; arm64 is untested.
"""

import ctypes
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.qemu_process.architecture import (
    ARCHITECTURES,
    Architecture,
    Gadgets,
    Registers,
    Request,
)
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Seconds

T = TypeVar("T")

LIMIT = Seconds(1.0)
"""Default time for stopping a thread and making all calls. A thread that waits in poll(2) stops in
less than 1 ms."""
SCRATCH = 2048
"""Bytes of memory for the arguments of a call."""
_SEIZE, _INTERRUPT, _DETACH, _CONT, _SYSCALL = 0x4206, 0x4207, 17, 7, 24
_GETREGSET, _SETREGSET = 0x4204, 0x4205
_GENERAL, _FLOATING = 1, 2  # NT_PRSTATUS, NT_PRFPREG
_MARK_SYSCALLS = 1  # PTRACE_O_TRACESYSGOOD
_WALL = 0x40000000
_EVENT_STOP = 128
_AT_SYSCALL = 5 | 0x80
_RED_ZONE = 128
_LIBRARY = re.compile(r"/(libc|ld-musl)[-.]|\[vdso\]")
_FRAME = 1536
"""Bytes below the scratch bytes for the detour's frame."""
_MOST = 1024
"""Bytes for a set of registers."""


class Why(Enum):
    """Why a call could not be made."""

    UNSUPPORTED = "its architecture, C library or stack is not supported"
    REFUSED = "the kernel does not permit tracing it"
    BUSY = "its main thread is not waiting in a system call"
    HANGS = "its main thread does not stop; it may be waiting for storage"
    ENDED = "it has ended"


class CannotInject(VmckptError):
    """Not all calls were completed, and the process continues.

    At the time limit, the last call may have taken effect although its end was not observed.
    """

    exit_code = 10

    def __init__(self, process: int, why: Why, detail: str = "") -> None:
        super().__init__(f"process {process}: {why.value}{detail and f': {detail}'}")
        self.why = why


class Stopped:
    """A thread stopped in a system call. Valid only inside `run`.

    The constructor and `syscall` raise CannotInject.
    """

    def __init__(self, tracer: "_Tracer", registers: Registers) -> None:
        self._tracer = tracer
        self._registers = registers
        self.scratch = _scratch(tracer.pid, registers[tracer.machine.stack])
        """Address of SCRATCH bytes that are unused until the thread runs again."""

    def write(self, content: bytes) -> None:
        """Write a call's arguments to the scratch bytes. Raises ValueError if they do not fit."""
        if len(content) > SCRATCH:
            raise ValueError(f"{len(content)} bytes do not fit into {SCRATCH} bytes of scratch")
        self._tracer.write(self.scratch, content)

    def read(self, length: int, at: int = 0) -> bytes:
        """Read a call's output from the scratch bytes, at offset `at`."""
        return self._tracer.read(self.scratch + at, length)

    def syscall(self, name: str, *arguments: int) -> int:
        """Make a system call and return its result. Raises OSError if it failed, and CannotInject.

        `name`: a key of `Architecture.numbers`.
        """
        number = self._tracer.machine.numbers[name]
        result = self._tracer.step(self._registers, self.scratch, number, arguments)
        if -4096 < result < 0:
            raise OSError(-result, os.strerror(-result))
        return result


def run(process: HeldProcess, work: Callable[[Stopped], T], limit: Seconds = LIMIT) -> T:
    """Stop the process's main thread, run `work`, and let the thread continue.

    `work` may make several calls. Returns the result of `work`. `limit`: time for stopping the
    thread and for all calls, in seconds. Raises CannotInject, and any error from `work`.
    """
    machine = ARCHITECTURES.get(platform.machine())
    if machine is None:
        raise CannotInject(process.pid, Why.UNSUPPORTED, f"CPU architecture {platform.machine()}")
    # A thread of its own does the tracing: when it ends, the kernel detaches it from the process.
    done: list[T] = []
    failed: list[BaseException] = []

    def trace() -> None:
        try:
            done.append(_Tracer(process, machine, limit).run(work))
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

    def __init__(self, process: HeldProcess, machine: Architecture, limit: Seconds) -> None:
        self.pid = process.pid
        self.machine = machine
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
                self._set(registers)
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
        """Wait until the process stops. Returns the signal that stopped it, or _EVENT_STOP.

        Signals that arrive are kept for later delivery. Raises CannotInject.
        """
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
        return self.machine.unpack(self._regset(_GENERAL))

    def _regset(self, which: int) -> bytes:
        content = ctypes.create_string_buffer(_MOST)
        vector = _IoVector(ctypes.addressof(content), _MOST)
        _ptrace(_GETREGSET, self.pid, ctypes.addressof(vector), which)
        return content.raw[: vector.length]

    def _set(self, registers: Registers) -> None:
        packed = self.machine.pack(registers)
        content = ctypes.create_string_buffer(packed, len(packed))
        vector = _IoVector(ctypes.addressof(content), len(packed))
        _ptrace(_SETREGSET, self.pid, ctypes.addressof(vector), _GENERAL)

    def _in_call(self, registers: Registers) -> bool:
        at = self.machine.waits_at(registers)
        return at is not None and self.read(at, len(self.machine.call)) == self.machine.call

    def step(self, before: Registers, scratch: int, number: int, arguments: tuple[int, ...]) -> int:
        """Run the detour up to the end of its system call, and return the call's result.

        Raises CannotInject.
        """
        gadgets = _gadgets(self.pid, _identity(self.pid), self.machine)
        at = scratch - _FRAME & ~15
        asked = Request(number, arguments, at, _blocked(self.pid), self._regset(_FLOATING))
        detour = self.machine.detour(before, gadgets, asked)
        self.write(at, detour.memory)
        self._set(detour.registers)
        # Single-stepping is unsafe: if the tracer died, the trap flag would kill the process.
        self._go_on(_SYSCALL, _AT_SYSCALL)
        self._go_on(_SYSCALL, _AT_SYSCALL)
        result = ctypes.c_longlong(self._registers()[self.machine.result]).value
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


class _IoVector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _ptrace(request: int, pid: int, data: int, address: int = 0) -> None:
    library = _library()
    if library.ptrace(request, pid, address, data) < 0:
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
def _gadgets(pid: int, started: str, machine: Architecture) -> Gadgets:
    """Find the instructions in the process's C library or vDSO. Raises CannotInject.

    `started` keeps a cached result from being used for a later process with the same ID.
    """
    del started
    call = back = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in _executable(pid):
            memory.seek(start)
            text = memory.read(end - start)
            if not call and (found := text.find(machine.call_and_return)) >= 0:
                call = start + found
            if not back and (match := machine.sigreturn.search(text)):
                back = start + match.start()
            if call and back:
                return Gadgets(call=call, back=back)
    raise CannotInject(pid, Why.UNSUPPORTED, "unknown C library")


def _executable(pid: int) -> list[tuple[int, int]]:
    """Return the executable mappings of the C library and the vDSO, as start and end addresses."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if "x" in words[1] and len(words) == 6 and _LIBRARY.search(words[5]):
            start, end = (int(one, 16) for one in words[0].split("-"))
            found.append((start, end))
    return found


def _blocked(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(one for one in status.splitlines() if one.startswith("SigBlk:")).split()[1], 16)


def _scratch(pid: int, stack: int) -> int:
    """Return an address below the red zone, within the stack's mapping.

    `stack`: the stack pointer of the stopped thread. Raises CannotInject.
    """
    address = stack - _RED_ZONE - SCRATCH & ~15
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        start, end = (int(one, 16) for one in words[0].split("-"))
        if start <= address - 2048 and address + SCRATCH <= end and words[1].startswith("rw"):
            return address
    raise CannotInject(pid, Why.UNSUPPORTED, "no writable memory below its stack pointer")
