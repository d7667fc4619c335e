"""The rules of processor architectures for system calls in another process. Pure.

Registers are those of the register set NT_PRSTATUS of ptrace(2), by name. x86-64 is tested; arm64
was written from the kernel's sources, and has never been run.
"""

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Registers = dict[str, int]

_NO_CALL = (1 << 64) - 1
_EINTR = 4


@dataclass(frozen=True, slots=True)
class Gadgets:
    """Addresses of the instructions in the process that form the detour."""

    call: int
    """A system call instruction and a return instruction."""
    back: int
    """The instructions that call rt_sigreturn(2)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A system call to make in a thread, and what the thread needs afterwards."""

    number: int
    arguments: tuple[int, ...]
    at: int
    """Address of free memory, a multiple of 16."""
    blocked: int
    """The thread's mask of blocked signals."""
    floating: bytes
    """The thread's floating-point registers, as NT_PRFPREG."""


@dataclass(frozen=True, slots=True)
class Detour:
    """Registers and memory for a thread to call the kernel, and then continue as after a signal."""

    registers: Registers
    memory: bytes
    """Bytes to write to memory at `Request.at`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Architecture:
    """An architecture, and its rules for system calls."""

    names: tuple[str, ...]
    """Names of the registers of NT_PRSTATUS, in order; 8 bytes each."""
    stack: str
    """Name of the stack pointer."""
    result: str
    """Name of the register with the result of a system call."""
    numbers: Mapping[str, int]
    """Numbers of the system calls that vmckpt makes in QEMU."""
    call: bytes
    """The system call instruction."""
    call_and_return: bytes
    """The system call instruction, followed by a return instruction."""
    sigreturn: re.Pattern[bytes]
    """Instructions that call rt_sigreturn(2)."""
    waits_at: Callable[[Registers], int | None]
    """Return where the system call instruction of a thread that waits in a system call must be.

    None: the thread does not wait in a system call.
    """
    detour: Callable[[Registers, Gadgets, Request], Detour]
    """Returns the detour of a thread with these registers for a request."""

    def pack(self, registers: Registers) -> bytes:
        """Return registers as NT_PRSTATUS."""
        return struct.pack(f"<{len(self.names)}Q", *(registers[name] for name in self.names))

    def unpack(self, content: bytes) -> Registers:
        """Parse NT_PRSTATUS, and return the registers by name."""
        values = struct.unpack_from(f"<{len(self.names)}Q", content)
        return dict(zip(self.names, values, strict=True))


_X86_IN_FRAME = (
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax",
    "rcx", "rsp", "rip", "eflags",
)  # fmt: skip
_X86_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
# UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
_X86_FRAME_FLAGS = 6
_X86_CALL = b"\x0f\x05"


def x86_frame(registers: Registers, blocked: int) -> bytes:
    """Return the frame for rt_sigreturn(2): `struct rt_sigframe` without its return address.

    `blocked`: the mask of blocked signals. The interrupted call returns EINTR. The frame has no
    floating point registers: a thread in a system call does not need them.
    """
    values = registers | {"rax": -_EINTR & _NO_CALL}
    context = struct.pack("<18Q", *(values[name] for name in _X86_IN_FRAME))
    context += struct.pack("<4H", *(registers[name] & 0xFFFF for name in ("cs", "gs", "fs", "ss")))
    # err, trapno, oldmask, cr2, no floating point, reserved
    context += bytes(4 * 8) + bytes(8) + bytes(8 * 8)
    head = struct.pack("<QQQiiQ", _X86_FRAME_FLAGS, 0, 0, 0, 0, 0)
    return head + context + struct.pack("<Q", blocked)


def _x86_waits_at(registers: Registers) -> int | None:
    in_call = registers["orig_rax"] < 1 << 63  # else the thread was interrupted elsewhere
    return registers["rip"] - len(_X86_CALL) if in_call else None


def _x86_detour(original: Registers, gadgets: Gadgets, asked: Request) -> Detour:
    # Without a number in orig_rax, the kernel does not restart the interrupted call here.
    registers = original | dict(zip(_X86_ARGUMENTS, asked.arguments, strict=False))
    registers |= {"rip": gadgets.call, "rsp": asked.at}
    registers |= {"rax": asked.number, "orig_rax": _NO_CALL}
    return Detour(registers, struct.pack("<Q", gadgets.back) + x86_frame(original, asked.blocked))


X86_64 = Architecture(
    names=(
        "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx",
        "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds",
        "es", "fs", "gs",
    ),
    stack="rsp",
    result="rax",
    numbers={
        "close": 3, "ioctl": 16, "getpid": 39, "socket": 41, "connect": 42, "recvmsg": 47,
        "timer_create": 222, "timer_settime": 223, "timer_delete": 226, "userfaultfd": 323,
    },
    call=_X86_CALL,
    call_and_return=_X86_CALL + b"\xc3",
    # mov $15, %rax; syscall: the return from a signal handler in glibc and musl.
    sigreturn=re.compile(rb"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05|\xb8\x0f\x00\x00\x00\x0f\x05"),
    waits_at=_x86_waits_at,
    detour=_x86_detour,
)  # fmt: skip

_SVC = b"\x01\x00\x00\xd4"  # svc #0
_FPSIMD = 0x46508001, 528
"""Magic and size of `struct fpsimd_context`."""
_VECTORS = 512
"""Bytes of the vector registers in NT_PRFPREG; FPSR and FPCR follow."""


def arm64_frame(registers: Registers, blocked: int, floating: bytes) -> bytes:
    """Return the frame for rt_sigreturn(2): `struct rt_sigframe`, up to the end of its records.

    `floating`: NT_PRFPREG. The kernel requires these registers in the frame.
    """
    siginfo, unused = bytes(128), bytes(120)
    # flags, link, stack (address, flags, padding, size), mask of signals
    context = struct.pack("<QQQiiQQ", 0, 0, 0, 0, 0, 0, blocked) + unused
    context = context.ljust(176, b"\0")  # struct sigcontext is aligned to 16 bytes in ucontext
    machine = struct.pack("<Q", 0) + ARM64.pack(registers)
    machine = machine.ljust(288, b"\0")  # and so are its records
    vectors, state = floating[:_VECTORS], floating[_VECTORS : _VECTORS + 8]
    return siginfo + context + machine + struct.pack("<II", *_FPSIMD) + state + vectors + bytes(16)


def _arm64_waits_at(registers: Registers) -> int | None:
    # When a debugger sees an interrupted call that the kernel will restart, the program counter is
    # at the call's instruction, and x0 has the first argument again.
    return registers["pc"]


def _arm64_detour(original: Registers, gadgets: Gadgets, asked: Request) -> Detour:
    registers = original | {f"x{index}": value for index, value in enumerate(asked.arguments)}
    registers |= {"pc": gadgets.call, "sp": asked.at, "x30": gadgets.back, "x8": asked.number}
    return Detour(registers, arm64_frame(original, asked.blocked, asked.floating))


ARM64 = Architecture(
    names=(*(f"x{number}" for number in range(31)), "sp", "pc", "pstate"),
    stack="sp",
    result="x0",
    numbers={
        "ioctl": 29, "close": 57, "timer_create": 107, "timer_settime": 110, "timer_delete": 111,
        "getpid": 172, "socket": 198, "connect": 203, "recvmsg": 212, "userfaultfd": 282,
    },
    call=_SVC,
    call_and_return=_SVC + b"\xc0\x03\x5f\xd6",
    # mov x8, #139; svc #0: the return from a signal handler in the vDSO.
    sigreturn=re.compile(re.escape(b"\x68\x11\x80\xd2" + _SVC)),
    waits_at=_arm64_waits_at,
    detour=_arm64_detour,
)  # fmt: skip

ARCHITECTURES = {"x86_64": X86_64, "aarch64": ARM64}
"""The supported architectures, by machine name as in uname(2)."""
