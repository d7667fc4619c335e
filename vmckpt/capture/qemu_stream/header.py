"""The head of QEMU's migration stream: all that comes before the first page. Pure.

Magic, version, configuration section with subsections, and the setup of the memory section with
its list of blocks. Written anew, it loses the mark of a stream without shared memory, and that of
COLO.
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

# The one command that may come before memory: it says that COLO is on, and holds nothing.
_ENABLE_COLO = struct.pack(">BHH", COMMAND, 8, 0)
# Machines of QEMU 10 and newer say so when the guest stands still, before the last of its memory;
# only assigned devices listen to it.
SWITCHOVER_START = struct.pack(">BHH", COMMAND, 11, 0)
_CAPABILITIES = "configuration/capabilities"
IGNORE_SHARED = "x-ignore-shared"
# Longer than any head: hundreds of blocks with names of 255 bytes.
LONGEST_HEAD = 1 << 20
_LARGEST_BLOCK = 1 << 52


class NeedMore(Exception):
    """The bytes end too early; not an error as long as more may come."""


def damaged(offset: int, found: str) -> StreamDamaged:
    """The one error for a stream that is not as it should be."""
    return StreamDamaged(
        f"migration stream, offset {offset}: {found}",
        hint="capture the guest again; if it fails the same way, use another way of capture",
    )


class Reader:
    """Reads big-endian numbers and names out of bytes, one after the other."""

    def __init__(self, data: bytes, *, base: int = 0) -> None:
        self._data = data
        self._base = base
        self.at = 0

    @property
    def offset(self) -> int:
        """Where in the whole stream it is."""
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
            raise damaged(where, f"a name of {length} bytes")
        return readable(self.raw(length), where)


def readable(name: bytes, offset: int) -> str:
    """A name as text; a name that no QEMU gives is an error."""
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise damaged(offset, f"a name that is none: {name[:20]!r}")
    return name.decode("ascii")


@dataclass(frozen=True, slots=True)
class RamBlock:
    """One piece of the guest's memory, as QEMU calls it."""

    name: str
    size: int
    address: int | None = None
    """Guest-physical; told only in a stream without shared memory."""


@dataclass(frozen=True, slots=True)
class Subsection:
    """A part of the configuration section, kept as it came."""

    name: str
    version: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """All that comes before the first page."""

    machine: str | None
    """None: a machine so old that its streams have no configuration section."""
    subsections: tuple[Subsection, ...] = ()
    capabilities: tuple[str, ...] = ()
    """Of which the stream says that the receiver must have them."""
    section: int
    instance: int
    version: int
    footers: bool
    """Whether each section ends with a footer; machines of QEMU 2.3 have none."""
    blocks: tuple[RamBlock, ...]

    @property
    def without_shared(self) -> bool:
        """Whether shared memory was left out of the stream."""
        return IGNORE_SHARED in self.capabilities

    def written(self, *, without_shared: bool = False) -> bytes:
        """The bytes of a head for these blocks; `without_shared` as it was only if it was so."""
        capabilities = [name for name in self.capabilities if name != IGNORE_SHARED]
        if without_shared:
            if any(block.address is None for block in self.blocks):
                raise ValueError("the blocks' addresses are not known")
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
        """What ends a piece of the memory section."""
        footer = struct.pack(">BI", FOOTER, self.section) if self.footers else b""
        return struct.pack(">Q", EOS) + footer


def _short(name: str) -> bytes:
    raw = name.encode("ascii")
    return bytes([len(raw)]) + raw


def parse_head(data: bytes) -> tuple[Head, int]:
    """Read the head at the beginning of `data`; return it with its length.

    Raises NeedMore if it is not all there, StreamDamaged if it is no head.
    """
    reader = Reader(data)
    if (magic := reader.raw(4)) != MAGIC:
        raise damaged(0, f"{magic!r} where QEMU's {MAGIC!r} should be")
    if (version := reader.number(4)) != VERSION:
        raise damaged(4, f"version {version}, where {VERSION} is known")
    machine, subsections, capabilities = _configuration(reader)
    where = reader.offset
    if reader.peek() == COMMAND and (told := reader.raw(5)) != _ENABLE_COLO:
        raise damaged(where, f"a command {told[1:].hex()}, which is not known here")
    where = reader.offset
    kind = reader.number(1)
    if kind != START:
        raise damaged(where, f"a section of type {kind:#04x}, where the memory's should begin")
    section = reader.number(4)
    if (name := reader.name()) != "ram":
        raise damaged(where, f"state of {name!r} that comes in pieces, which is not known here")
    instance, version = reader.number(4), reader.number(4)
    if version != 4:
        raise damaged(where, f"memory in version {version}, where 4 is known")
    blocks = _blocks(reader, addresses=IGNORE_SHARED in capabilities)
    where = reader.offset
    if (flags := reader.number(8)) != EOS:
        raise damaged(where, f"{flags:#x} where the list of blocks should end")
    # Whatever follows a section is not the footer's number, if there is no footer.
    footers = reader.peek() == FOOTER
    if footers:
        check_footer(reader, section)
    head = Head(
        machine=machine, subsections=subsections, capabilities=capabilities, section=section,
        instance=instance, version=version, footers=footers, blocks=blocks,
    )  # fmt: skip
    return head, reader.at


def check_footer(reader: Reader, section: int) -> None:
    """Read the end of a section."""
    where = reader.offset
    mark, number = reader.number(1), reader.number(4)
    if (mark, number) != (FOOTER, section):
        raise damaged(where, f"{mark:#04x} {number} where section {section} should end")


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
                raise damaged(where, "a machine whose pages are not of 4096 bytes")
        elif name == "configuration/uuid":
            kept.append(Subsection(name, version, reader.raw(16)))
        else:
            raise damaged(where, f"{name!r}, which is not known here")
    unknown = [name for name in capabilities if name != IGNORE_SHARED]
    if unknown:
        raise damaged(reader.offset, f"made with {', '.join(unknown)}, which is not known here")
    return machine, tuple(kept), tuple(capabilities)


def _at_most(number: int, limit: int, offset: int) -> int:
    if number > limit:
        raise damaged(offset, f"a list of {number}")
    return number


def _blocks(reader: Reader, *, addresses: bool) -> tuple[RamBlock, ...]:
    where = reader.offset
    total = reader.number(8)
    if total & FLAGS != MEM_SIZE:
        raise damaged(where, f"{total:#x} where the size of memory should be")
    left, blocks, names = total & ~FLAGS, [], set()
    while left:
        where = reader.offset
        name, size = reader.name(), reader.number(8)
        address = reader.number(8) if addresses else None
        if not 0 < size <= min(left, _LARGEST_BLOCK) or size % PAGE:
            raise damaged(where, f"block {name!r} of {size} bytes, with {left} left")
        if name in names:
            raise damaged(where, f"block {name!r} for the second time")
        blocks.append(RamBlock(name, size, address))
        names.add(name)
        left -= size
    if not blocks:
        raise damaged(where, "memory without any block")
    return tuple(blocks)
