"""The header of QEMU's migration stream: everything before the first page. Pure.

The header consists of the magic number, the version, the configuration section with subsections,
and the setup of the memory section, which lists the blocks. When the header is written again, the
markers of COLO and, by default, of a stream without shared memory are left out.
"""

import struct
from dataclasses import dataclass

from vmckpt.errors import StreamDamaged

MAGIC = b"QEVM"
VERSION = 3
PAGE = 4096
# Types of sections.
EOF, START, PART, END, FULL, SUBSECTION, DESCRIPTION, CONFIGURATION, COMMAND = range(9)
FOOTER = 0x7E
# Flags in the low bits of a page's address.
ZERO, MEM_SIZE, FULL_PAGE, EOS, CONTINUE = 0x02, 0x04, 0x08, 0x10, 0x20
FLAGS = PAGE - 1

# The only command that may precede memory: it enables COLO, and has no data.
_ENABLE_COLO = struct.pack(">BHH", COMMAND, 8, 0)
# With machine types of QEMU 10 and newer, QEMU sends this command when the guest is paused, before
# the last memory. Only assigned devices use it.
SWITCHOVER_START = struct.pack(">BHH", COMMAND, 11, 0)
_CAPABILITIES = "configuration/capabilities"
IGNORE_SHARED = "x-ignore-shared"
# Longer than any header, even with hundreds of blocks with names of 255 bytes.
LONGEST_HEAD = 1 << 20
_LARGEST_BLOCK = 1 << 52


class NeedMore(Exception):
    """More bytes are needed to continue; an error only at the end of the stream."""


def damaged(offset: int, found: str) -> StreamDamaged:
    """Return the error for an invalid stream. `found`: the problem at the given offset."""
    return StreamDamaged(
        f"migration stream, offset {offset}: {found}",
        hint="try again; a snapshot can also use another capture method (--way)",
    )


class Reader:
    """Reads consecutive big-endian numbers and names. Raises NeedMore at the end of the data."""

    def __init__(self, data: bytes, *, base: int = 0) -> None:
        self._data = data
        self._base = base
        self.at = 0

    @property
    def offset(self) -> int:
        """The current offset from the start of the stream."""
        return self._base + self.at

    def raw(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self._data):
            raise NeedMore
        piece = self._data[self.at : end]
        self.at = end
        return piece

    def number(self, length: int) -> int:
        return int.from_bytes(self.raw(length), "big")

    def peek(self) -> int:
        if self.at >= len(self._data):
            raise NeedMore
        return self._data[self.at]

    def name(self, length_bytes: int = 1, *, at_most: int = 255) -> str:
        where = self.offset
        length = self.number(length_bytes)
        if not 0 < length <= at_most:
            raise damaged(where, f"invalid name length of {length} bytes")
        return readable(self.raw(length), where)


def readable(name: bytes, offset: int) -> str:
    """Return a name as text. Raises StreamDamaged if it is not printable ASCII.

    `offset`: of the name in the stream, for the error.
    """
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise damaged(offset, f"invalid name {name[:20]!r}")
    return name.decode("ascii")


@dataclass(frozen=True, slots=True)
class RamBlock:
    """A block of the guest's memory, with QEMU's name."""

    name: str
    size: int
    address: int | None = None
    """Guest-physical address; only in a stream without shared memory."""


@dataclass(frozen=True, slots=True)
class Subsection:
    """A part of the configuration section, kept unchanged."""

    name: str
    version: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Everything before the first page."""

    machine: str | None
    """The machine type; None if it is so old that streams have no configuration section."""
    subsections: tuple[Subsection, ...] = ()
    capabilities: tuple[str, ...] = ()
    """Capabilities that the stream requires of the receiver."""
    section: int
    instance: int
    version: int
    footers: bool
    """Whether each section ends with a footer; machine types of QEMU 2.3 and older have none."""
    blocks: tuple[RamBlock, ...]

    @property
    def without_shared(self) -> bool:
        """Whether shared memory was left out of the stream."""
        return IGNORE_SHARED in self.capabilities

    def written(self, *, without_shared: bool = False) -> bytes:
        """Return the bytes of the header.

        `without_shared`: write the header of a stream without shared memory. If this header was not
        read from such a stream, ValueError is raised.
        """
        capabilities = [name for name in self.capabilities if name != IGNORE_SHARED]
        if without_shared:
            if any(block.address is None for block in self.blocks):
                raise ValueError("the addresses of the blocks are unknown")
            capabilities.append(IGNORE_SHARED)
        out = [MAGIC, struct.pack(">I", VERSION)]
        if self.machine is not None:
            out.append(self._configuration(capabilities))
        out.append(struct.pack(">BIB3sII", START, self.section, 3, b"ram", self.instance,
                               self.version))  # fmt: skip
        out.append(struct.pack(">Q", sum(block.size for block in self.blocks) | MEM_SIZE))
        for block in self.blocks:
            out.append(_short(block.name) + struct.pack(">Q", block.size))
            if without_shared:
                out.append(struct.pack(">Q", block.address))
        return b"".join([*out, self.section_end()])

    def _configuration(self, capabilities: list[str]) -> bytes:
        machine = (self.machine or "").encode("ascii")
        out = [struct.pack(">BI", CONFIGURATION, len(machine)), machine]
        kept = [(s.name, s.version, s.content) for s in self.subsections]
        if capabilities:
            named = struct.pack(">I", len(capabilities)) + b"".join(map(_short, capabilities))
            kept.append((_CAPABILITIES, 1, named))
        for name, version, content in kept:
            out += [bytes([SUBSECTION]), _short(name), struct.pack(">I", version), content]
        return b"".join(out)

    def section_end(self) -> bytes:
        """Return the bytes that end a part of the memory section."""
        footer = struct.pack(">BI", FOOTER, self.section) if self.footers else b""
        return struct.pack(">Q", EOS) + footer


def _short(name: str) -> bytes:
    raw = name.encode("ascii")
    return bytes([len(raw)]) + raw


def parse_head(data: bytes) -> tuple[Head, int]:
    """Parse the header at the beginning of a stream. Returns the header and its length.

    Raises StreamDamaged if the header is invalid or incomplete.
    """
    try:
        return parse_available_head(data)
    except NeedMore:
        raise damaged(len(data), "the stream ends within its header") from None


def parse_available_head(data: bytes) -> tuple[Head, int]:
    """Like `parse_head`, but raise NeedMore if `data` ends before the header does.

    Raises StreamDamaged if the header is invalid.
    """
    reader = Reader(data)
    if (magic := reader.raw(4)) != MAGIC:
        raise damaged(0, f"magic {magic!r} instead of {MAGIC!r}")
    if (version := reader.number(4)) != VERSION:
        raise damaged(4, f"version {version} instead of {VERSION}")
    machine, subsections, capabilities = _configuration(reader)
    where = reader.offset
    if reader.peek() == COMMAND and (told := reader.raw(5)) != _ENABLE_COLO:
        raise damaged(where, f"unknown command {told[1:].hex()}")
    where = reader.offset
    kind = reader.number(1)
    if kind != START:
        raise damaged(where, f"section of type {kind:#04x} instead of the start of memory")
    section = reader.number(4)
    if (name := reader.name()) != "ram":
        raise damaged(where, f"state of {name!r} in several parts is not supported")
    instance, version = reader.number(4), reader.number(4)
    if version != 4:
        raise damaged(where, f"memory section of version {version} instead of 4")
    blocks = _blocks(reader, addresses=IGNORE_SHARED in capabilities)
    where = reader.offset
    if (flags := reader.number(8)) != EOS:
        raise damaged(where, f"{flags:#x} instead of the end of the list of blocks")
    # In a stream without footers, no section that can follow here begins with the footer's mark.
    footers = reader.peek() == FOOTER
    if footers:
        check_footer(reader, section)
    head = Head(
        machine=machine, subsections=subsections, capabilities=capabilities, section=section,
        instance=instance, version=version, footers=footers, blocks=blocks,
    )  # fmt: skip
    return head, reader.at


def check_footer(reader: Reader, section: int) -> None:
    """Read the footer of the section numbered `section`.

    Raises StreamDamaged if it is invalid, and NeedMore.
    """
    where = reader.offset
    mark, number = reader.number(1), reader.number(4)
    if (mark, number) != (FOOTER, section):
        raise damaged(where, f"{mark:#04x} {number} instead of the footer of section {section}")


def _configuration(
    reader: Reader,
) -> tuple[str | None, tuple[Subsection, ...], tuple[str, ...]]:
    if reader.peek() != CONFIGURATION:
        return None, (), ()
    reader.number(1)
    machine = reader.name(4)
    kept, capabilities = [], []
    while reader.peek() == SUBSECTION:
        where = reader.offset
        reader.number(1)
        name, version = reader.name(), reader.number(4)
        if name == _CAPABILITIES:
            named = _at_most(reader.number(4), 64, where)
            capabilities += [reader.name() for _ in range(named)]
        elif name == "configuration/target-page-bits":
            kept.append(Subsection(name, version, reader.raw(4)))
            if kept[-1].content != struct.pack(">I", PAGE.bit_length() - 1):
                raise damaged(where, "the page size of the machine is not 4096 bytes")
        elif name == "configuration/uuid":
            kept.append(Subsection(name, version, reader.raw(16)))
        else:
            raise damaged(where, f"unknown subsection {name!r}")
    unknown = [name for name in capabilities if name != IGNORE_SHARED]
    if unknown:
        raise damaged(reader.offset, f"unsupported capabilities: {', '.join(unknown)}")
    return machine, tuple(kept), tuple(capabilities)


def _at_most(number: int, limit: int, offset: int) -> int:
    if number > limit:
        raise damaged(offset, f"list of {number} entries; at most {limit} are supported")
    return number


def _blocks(reader: Reader, *, addresses: bool) -> tuple[RamBlock, ...]:
    where = reader.offset
    total = reader.number(8)
    if total & FLAGS != MEM_SIZE:
        raise damaged(where, f"{total:#x} instead of the size of memory")
    left, blocks, names = total & ~FLAGS, [], set()
    while left:
        where = reader.offset
        name, size = reader.name(), reader.number(8)
        address = reader.number(8) if addresses else None
        if not 0 < size <= min(left, _LARGEST_BLOCK) or size % PAGE:
            raise damaged(where, f"invalid size of block {name!r}: {size} bytes, with {left} left")
        if name in names:
            raise damaged(where, f"block {name!r} occurs twice")
        blocks.append(RamBlock(name, size, address))
        names.add(name)
        left -= size
    if not blocks:
        raise damaged(where, "the list of memory blocks is empty")
    return tuple(blocks)
