"""Registers and frames of both architectures, as plain data: arm64 has never been run."""

import struct

import pytest

from vmckpt.hypervisor.qemu_process.architecture import (
    ARCHITECTURES,
    ARM64,
    X86_64,
    Architecture,
    Gadgets,
    Request,
)
from vmckpt.remote import probe

GADGETS = Gadgets(call=0x1000, back=0x2000)
FLOATING = bytes(range(256)) * 2 + b"FPSRFPCR" + bytes(8)


def numbered(machine: Architecture) -> dict[str, int]:
    """Each register has a value of its own."""
    return {name: 0x100 + index for index, name in enumerate(machine.names)}


@pytest.mark.parametrize("machine", [X86_64, ARM64])
def test_registers_are_packed_in_the_kernel_s_order(machine: Architecture) -> None:
    registers = numbered(machine)
    content = machine.pack(registers)
    assert struct.unpack(f"<{len(content) // 8}Q", content) == tuple(registers.values())
    assert machine.unpack(content) == registers
    assert machine.unpack(content + b"more") == registers


def test_the_sets_have_the_kernel_s_sizes() -> None:
    assert len(X86_64.pack(numbered(X86_64))) == 27 * 8  # struct user_regs_struct
    assert len(ARM64.pack(numbered(ARM64))) == 34 * 8  # struct user_pt_regs
    assert [ARM64.names.index(name) for name in ("x0", "x30", "sp", "pc", "pstate")] == [
        0, 30, 31, 32, 33,
    ]  # fmt: skip


def test_a_detour_on_arm64_calls_the_kernel_and_comes_back() -> None:
    before = numbered(ARM64)
    made = ARM64.detour(before, GADGETS, Request(282, (5, 6), 0x7000, 0b1000, FLOATING))
    changed = {name: value for name, value in made.registers.items() if before[name] != value}
    assert changed == {"pc": 0x1000, "sp": 0x7000, "x30": 0x2000, "x8": 282, "x0": 5, "x1": 6}

    # struct rt_sigframe: 128 bytes of siginfo, then struct ucontext
    frame = made.memory
    assert frame[:128] == bytes(128)
    assert struct.unpack_from("<Q", frame, 128 + 40) == (0b1000,), "the mask of signals"
    machine = 128 + 176
    assert struct.unpack_from("<Q", frame, machine) == (0,), "fault_address"
    assert ARM64.unpack(frame[machine + 8 :]) == before
    records = machine + 288
    assert records % 16 == 0
    assert struct.unpack_from("<II", frame, records) == (0x46508001, 528)
    assert frame[records + 8 : records + 16] == b"FPSRFPCR"
    assert frame[records + 16 : records + 528] == FLOATING[:512]
    assert frame[records + 528 :] == bytes(16), "the end of the records"


def test_a_detour_on_x86_64_calls_the_kernel_and_comes_back() -> None:
    before = numbered(X86_64)
    made = X86_64.detour(before, GADGETS, Request(323, (5, 6), 0x7000, 0b1000, b""))
    changed = {name: value for name, value in made.registers.items() if before[name] != value}
    assert changed == {
        "rip": 0x1000, "rsp": 0x7000, "rax": 323, "orig_rax": (1 << 64) - 1, "rdi": 5, "rsi": 6,
    }  # fmt: skip
    frame = made.memory
    assert struct.unpack_from("<Q", frame) == (0x2000,), "the return address"
    context = struct.unpack_from("<18Q", frame, 8 + 40)
    assert context[15:] == (before["rsp"], before["rip"], before["eflags"])
    assert context[13] == (1 << 64) - 4, "rax: EINTR"
    assert struct.unpack("<Q", frame[-8:]) == (0b1000,)


def test_where_a_thread_waits() -> None:
    x86 = numbered(X86_64) | {"rip": 0x5002, "orig_rax": 7}
    assert X86_64.waits_at(x86) == 0x5000
    assert X86_64.waits_at(x86 | {"orig_rax": (1 << 64) - 1}) is None, "interrupted by a signal"
    # The kernel has set the program counter back to the instruction, for the restart.
    assert ARM64.waits_at(numbered(ARM64) | {"pc": 0x5000}) == 0x5000


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (X86_64, b"\x90\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05\x90"),
        (ARM64, b"\x1f\x20\x03\xd5\x68\x11\x80\xd2\x01\x00\x00\xd4"),  # nop; mov x8, #139; svc #0
    ],
)
def test_the_detour_s_instructions_are_found(machine: Architecture, code: bytes) -> None:
    assert machine.call_and_return.startswith(machine.call)
    assert {*machine.numbers} == {*X86_64.numbers}
    assert machine.sigreturn.search(code) is not None


def test_machines_have_their_architecture() -> None:
    assert ARCHITECTURES["x86_64"] is X86_64
    assert ARCHITECTURES["aarch64"] is ARM64
    assert {*ARCHITECTURES} == probe.TRACED
    assert probe.UNTESTED < probe.TRACED
