"""Read a stream's tail: the devices' sections, and the processors' registers. Pure.

QEMU describes the fields in JSON at the end of the stream, except with old machine types.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.capture.qemu_stream.header import DESCRIPTION, EOF, FULL
from vmckpt.errors import StreamDamaged

_SEGMENT = struct.Struct(">IQII")
_SEGMENTS = ("es", "cs", "ss", "ds", "fs", "gs")
_REGISTERS = ("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi",
              *(f"r{n}" for n in range(8, 16)))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Section:
    """One device's state."""

    name: str
    instance: int
    fields: Sequence[dict[str, Any]]
    content: bytes
    """The bytes from the section's first field to the end of the tail; its own end is unknown."""

    def field(self, wanted: str) -> bytes | None:
        """Return the bytes of a field of fixed size; None if the field is missing or incomplete."""
        at = 0
        for field in self.fields:
            size = int(field["size"]) * int(field.get("array_len", 1))
            if field["name"] == wanted:
                piece = self.content[at : at + size]
                return piece if len(piece) == size else None
            at += size
        return None


def description(tail: bytes) -> dict[str, Any] | None:
    """Return the JSON description at the end of a stream's tail; None if it has no valid one."""
    mark = bytes([EOF, DESCRIPTION])
    at = len(tail)
    while (at := tail.rfind(mark, 0, at)) >= 0:
        text = tail[at + 6 :]
        if int.from_bytes(tail[at + 2 : at + 6], "big") == len(text):
            try:
                told = json.loads(text)
            except (ValueError, RecursionError):
                continue
            return told if isinstance(told, dict) else None
    return None


def check_tail(tail: bytes, *, described: bool = True) -> None:
    """Check that a tail is complete. Raises StreamDamaged.

    `described`: the tail must end with QEMU's description, as for all machines with footers.
    """
    if description(tail) is None and (described or tail[-1:] != bytes([EOF])):
        raise StreamDamaged(
            f"migration stream: the device state is incomplete ({len(tail)} bytes)",
            hint="try again",
        )


def sections(tail: bytes) -> list[Section]:
    """Return the device sections in a tail, in order; empty if the description does not fit."""
    told = description(tail)
    found, at = [], 0
    try:
        for device in told["devices"] if told is not None else ():
            name, instance = str(device["name"]), int(device["instance_id"])
            head = struct.pack("B", len(name)) + name.encode("ascii")
            head += struct.pack(">II", instance, int(device["version"]))
            begin = re.compile(struct.pack("B", FULL) + b".{4}" + re.escape(head), re.DOTALL)
            match = begin.search(tail, at)
            if match is None:
                return []
            at = match.end()
            found.append(Section(name, instance, device.get("fields", ()), tail[at:]))
    except (KeyError, TypeError, ValueError, struct.error):
        return []
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment register."""

    selector: int
    base: int
    limit: int
    flags: int


@dataclass(frozen=True, slots=True)
class Processor:
    """The registers of an x86 processor that debuggers use."""

    registers: dict[str, int]
    """rax to r15, rip, rflags, cr0, cr2, cr3, cr4 and kernel_gs_base."""
    segments: dict[str, Segment]
    """es, cs, ss, ds, fs, gs, ldt, tr, gdt, idt."""


def processors(tail: bytes) -> list[Processor]:
    """Return the x86 processors in a tail, in order; empty if the tail does not describe them."""
    found = []
    for section in sections(tail):
        if section.name == "cpu":
            try:
                found.append(_processor(section))
            except (LookupError, ValueError, struct.error):
                return []
    return found


def _processor(section: Section) -> Processor:
    def number(name: str) -> int:
        raw = section.field(name)
        if raw is None:
            raise LookupError(name)
        return int.from_bytes(raw, "big")

    general = section.field("env.regs") or b""
    registers = dict(zip(_REGISTERS, struct.unpack(">16Q", general), strict=True))
    registers |= {"rip": number("env.eip"), "rflags": number("env.eflags")}
    registers |= {f"cr{n}": number(f"env.cr[{n}]") for n in (0, 2, 3, 4)}
    registers["kernel_gs_base"] = number("env.kernelgsbase")
    raw = section.field("env.segs") or b""
    segments = dict(zip(_SEGMENTS, _SEGMENT.iter_unpack(raw), strict=True))
    for name in ("ldt", "tr", "gdt", "idt"):
        segments[name] = _SEGMENT.unpack(section.field(f"env.{name}") or b"")
    return Processor(registers, {name: Segment(*told) for name, told in segments.items()})
