"""Find the RAM blocks of a running QEMU in its address space, whatever backs them.

HMP `info ramblock` lists the blocks. `info mtree -f` shows where the guest sees them, and `gpa2hva`
returns the address in QEMU of such a place. The address of a block that the guest does not see at
the moment is unknown. The content of such a block does not matter if it is a ROM: a QEMU of the
same version with the same devices fills the ROM with the same content at the start and at resets.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why
from vmckpt.capture.migration_settings import Commands
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_BLOCK = re.compile(r"^\s*(\S+)\s+\d+ \S+\s+0x[0-9a-f]+\s+0x([0-9a-f]+)\s+0x", re.MULTILINE)
_REGION = re.compile(
    r"^\s+([0-9a-f]{16})-[0-9a-f]{16} \(prio -?\d+, (?:ram|rom|romd)\): (\S+)(?: @([0-9a-f]{16}))?",
    re.MULTILINE,
)
_ADDRESS = re.compile(r"Host virtual address for 0x[0-9a-f]+ \((.+)\) is 0x([0-9a-f]+)")
# Option ROMs of cards, ROMs of fw_cfg (ACPI tables and their loader), and the legacy option ROMs.
_CONSTANT = re.compile(r"/rom@.+|.+\.rom")
_MAIN = "pc.ram"
OBJECTS = "/objects/"
"""Prefix of a memory backend's name in some names of blocks."""


@dataclass(frozen=True, slots=True)
class RamBlock:
    """A block of memory in QEMU."""

    name: str
    """QEMU's name, as in its migration stream."""
    range: MemoryRange


@dataclass(frozen=True, slots=True)
class RamBlocks:
    """All blocks whose content must be copied."""

    guest: tuple[RamBlock, ...]
    """The guest's memory, sorted by name, since the order of `query-memdev` may change."""
    private: tuple[RamBlock, ...]
    """Other blocks, such as video memory and flash."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a block that the guest sees."""

    name: str
    guest_address: int
    offset: int
    """Offset of the part in the block."""


def find(monitor: Commands, process: HeldProcess) -> RamBlocks:
    """Return a guest's RAM blocks, except constant ROMs whose address is not known.

    Raises CannotTrack if the address of another block cannot be determined, HypervisorError,
    OSError.
    """
    sizes = blocks(_hmp(monitor, "info ramblock"))
    seen = regions(_hmp(monitor, "info mtree -f"))
    backends = [str(one.get("id", "")) for one in monitor.ask("query-memdev")] or [_MAIN]
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    found: list[RamBlock] = []
    for name, size in sizes.items():
        start = _start(monitor, name, seen)
        if start is None:
            if _CONSTANT.fullmatch(name):
                continue
            raise CannotTrack(process.pid, Why.NOT_FOUND, name)
        block = RamBlock(name, MemoryRange(start, size))
        if not is_mapped(maps, block.range):
            raise CannotTrack(process.pid, Why.NOT_FOUND, f"{name} at {start:#x}")
        found.append(block)
    by_name = {one.name.removeprefix(OBJECTS): one for one in found}
    guest = tuple(by_name[one] for one in sorted(backends) if one in by_name)
    if len(guest) != len(backends):
        raise CannotTrack(process.pid, Why.NOT_FOUND, ", ".join(backends))
    return RamBlocks(guest, tuple(one for one in found if one not in guest))


def address(monitor: Commands, name: str) -> int | None:
    """Return the address in QEMU of a block that the guest sees; None if it is not known.

    Raises HypervisorError.
    """
    return _start(monitor, name, regions(_hmp(monitor, "info mtree -f")))


def _hmp(monitor: Commands, command: str) -> str:
    return str(monitor.ask("human-monitor-command", **{"command-line": command}))


def _start(monitor: Commands, name: str, seen: Sequence[Region]) -> int | None:
    """Return a block's address in QEMU; None if it is not known.

    `seen`: the regions of the guest's memory that QEMU lists.
    """
    found = set()
    for one in matching(name, seen):
        told = _ADDRESS.search(_hmp(monitor, f"gpa2hva {one.guest_address:#x}"))
        # Another region may cover this place in the view of the processor.
        if told is not None and told[1] == one.name:
            found.add(int(told[2], 16) - one.offset)
    return found.pop() if len(found) == 1 else None


def blocks(text: str) -> Mapping[str, int]:
    """Return the size of each block, in bytes, from `info ramblock`. Pure."""
    return {match[1]: int(match[2], 16) for match in _BLOCK.finditer(text)}


def regions(text: str) -> tuple[Region, ...]:
    """Return the parts of blocks in `info mtree -f`, each part once. Pure."""
    found = (
        Region(match[2], int(match[1], 16), int(match[3] or "0", 16))
        for match in _REGION.finditer(text)
    )
    return tuple(dict.fromkeys(found))


def matching(name: str, seen: Sequence[Region]) -> list[Region]:
    """Return the regions of the block `name`. Pure.

    The name of a device's block is the device's path followed by the name of the region.
    """
    return [one for one in seen if name == one.name or name.endswith(f"/{one.name}")]


def is_mapped(maps: str, one: MemoryRange) -> bool:
    """Return whether a range of whole pages is in one writable mapping of /proc/PID/maps. Pure."""
    if one.start % PAGE or one.size % PAGE or not one.size:
        return False
    for line in maps.splitlines():
        words = line.split(maxsplit=2)
        start, end = (int(word, 16) for word in words[0].split("-"))
        if start <= one.start and one.start + one.size <= end:
            return words[1].startswith("rw")
    return False
