"""Browse a snapshot without restoring it: export its disks, write its memory as a core file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vmckpt.capture.nbd.session import Export
from vmckpt.capture.qemu_stream import devices, elf_core
from vmckpt.capture.qemu_stream.elf_core import CoreWriter, Stretch
from vmckpt.capture.qemu_stream.header import PAGE, RamBlock
from vmckpt.errors import BadInput, StoreDamaged
from vmckpt.snapshot.catalog import Progress, copied_so_far, silent
from vmckpt.store.assemble import Assembly
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.chunk_map import Kind
from vmckpt.store.format.metadata import Contents, Public
from vmckpt.store.format.private_part import Private, RegionMap

_MAIN = ("pc.ram", "ram-node")


@dataclass(frozen=True, slots=True)
class Browse:
    """An opened snapshot; use it only while its reader is open."""

    public: Public
    private: Private
    reader: Reader

    def disks(self) -> tuple[str, ...]:
        """Return the targets of the snapshot's disks, such as vda."""
        return tuple(one.name for one in self.private.regions if one.kind is Kind.DISK)

    def export(self, disk: str) -> Export:
        """Return an NBD export of a disk.

        Raises BadInput if there is no such disk, and StoreDamaged.
        """
        region = self.private.region(disk)
        if region is None or region.kind is not Kind.DISK:
            known = ", ".join(self.disks()) or "none"
            raise BadInput(
                f"{self.public.id} has no disk {disk!r}", hint=f"choose one of its disks: {known}"
            )
        assembly = self._assembly(region)
        return Export(size=region.size, read=assembly.read_bytes, extents=assembly.zeros)

    def exports(self, disk: str | None) -> Mapping[str, Export]:
        """Return exports of one disk or all disks, by target. Raises BadInput if there is none."""
        names = self.disks() if disk is None else (disk,)
        if not names:
            raise BadInput(f"snapshot {self.public.id} has no disks")
        return {name: self.export(name) for name in names}

    def _assembly(self, region: RegionMap) -> Assembly:
        return Assembly(region.kind, region.size, region.map, self.private.chunks, self.reader)

    def core(self, path: Path, progress: Progress = silent, *, replace: bool = False) -> int:
        """Write the memory as a sparse ELF core. Returns the number of processors in the core.
        `replace`: overwrite an existing file.

        Raises BadInput, StoreError, OSError; an incomplete core is removed.
        """
        stretches = layout(self.public, self.private)
        processors = devices.processors(self._stream("tail"))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
        try:
            file = os.open(path, flags, 0o600)
        except FileExistsError as exc:
            raise BadInput(f"{path} already exists", hint="choose another name") from exc
        try:
            writer = CoreWriter(file, stretches, processors)
            writer.begin()
            self._memory(writer, {one.block for one in stretches}, progress)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return len(processors)

    def _memory(self, writer: CoreWriter, blocks: set[str], progress: Progress) -> None:
        regions = [one for one in self.private.regions if one.name in blocks]
        total, done = sum(one.size for one in regions), 0
        for region in regions:
            for piece in self._assembly(region).pieces():
                if piece.data is not None:
                    writer.memory(region.name, piece.start * PAGE, piece.data)
                done += piece.count * PAGE
                progress(copied_so_far("core", done, total))

    def _stream(self, name: str) -> bytes:
        part = next((one for one in self.private.facts.stream if one.name == name), None)
        if part is None:
            raise StoreDamaged(
                f'the migration stream of snapshot {self.public.id} is damaged: part "{name}" is'
                " missing"
            )
        chunks = [self.private.chunks[index] for index in part.chunks]
        return b"".join(self.reader.read_many(chunks))


def layout(public: Public, private: Private) -> tuple[Stretch, ...]:
    """Return the guest-physical layout of the memory. Raises BadInput if it is unknown. Pure."""
    if public.contents is not Contents.MEMORY:
        raise BadInput(f"snapshot {public.id} has no memory, only disks")
    if public.arch != "x86_64":
        raise BadInput(f"{public.guest} has architecture {public.arch}; core files require x86_64")
    blocks = [
        RamBlock(one.name, one.size)
        for one in private.regions
        if one.kind is Kind.RAM and one.name.removeprefix("/objects/").startswith(_MAIN)
    ]
    if not blocks:
        raise BadInput(f"snapshot {public.id} has no RAM block recognised as main memory")
    return elf_core.usual_layout(blocks, public.machine)
