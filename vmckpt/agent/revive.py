"""A snapshot's memory as the save image that libvirt starts a guest from."""

import os
from collections.abc import Sequence

import numpy as np

from vmckpt.agent.talk import Talk
from vmckpt.capture.qemu_stream import save_image
from vmckpt.capture.qemu_stream.header import parse_head
from vmckpt.capture.qemu_stream.stream import Buffer, StreamWriter, starts_as_zeros
from vmckpt.errors import Cancelled, StoreDamaged, StoreError
from vmckpt.store.assemble import Assembly, Piece
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.chunk_map import UNIT, Kind
from vmckpt.store.format.private_part import Private, RegionMap

_PAGE = UNIT[Kind.RAM]


class Revival:
    """Writes the image, once for each time that somebody begins to read it."""

    def __init__(self, xml: str, private: Private, reader: Reader, talk: Talk) -> None:
        """`xml`: what the guest is to be. Raises StoreDamaged if some memory is missing."""
        self._xml, self._talk = xml, talk
        self._private, self._reader = private, reader
        self._head, _ = parse_head(self._part("head") + b"\0")
        self._tail = self._part("tail")
        regions = {one.name: one for one in private.regions if one.kind is Kind.RAM}
        missing = [one.name for one in self._head.blocks if one.name not in regions]
        if missing:
            raise StoreDamaged(f"the snapshot has no memory {missing[0]!r}")
        self._regions: Sequence[RegionMap] = [regions[one.name] for one in self._head.blocks]
        self._done = 0
        self.trouble: Exception | None = None
        """What broke it off: libvirt tells only that the image ended too early."""

    def _part(self, name: str) -> bytes:
        part = next((one for one in self._private.facts.stream if one.name == name), None)
        if part is None:
            raise StoreDamaged("the snapshot has no memory")
        chunks = [self._private.chunks[index] for index in part.chunks]
        blob = b"".join(self._reader.read_many(chunks))
        if len(blob) != part.size:
            raise StoreDamaged(f"the snapshot's {name} has {len(blob)} bytes, not {part.size}")
        return blob

    def fill(self, file: int) -> None:
        """Write all of it. Raises OSError, StoreError, Cancelled."""
        try:
            self._fill(file)
        except (StoreError, Cancelled) as exc:
            self.trouble = exc
            raise

    def _fill(self, file: int) -> None:
        def write(data: Buffer) -> None:
            left = memoryview(data).cast("B")
            while left:
                left = left[os.write(file, left) :]

        self._done = 0
        write(save_image.header(self._xml, running=True))
        writer = StreamWriter(self._head, write)
        writer.opening()
        for region in self._regions:
            assembly = Assembly(
                region.kind, region.size, region.map, self._private.chunks, self._reader
            )
            for piece in assembly.pieces():
                self._piece(writer, region.name, piece)
        writer.closing(self._tail)

    def _piece(self, writer: StreamWriter, block: str, piece: Piece) -> None:
        numbers = np.arange(piece.start, piece.start + piece.count, dtype=np.uint64)
        addresses = numbers * np.uint64(_PAGE)
        if piece.data is not None:
            pages = np.frombuffer(piece.data, dtype=np.uint8).reshape(-1, _PAGE)
            writer.pages(block, addresses, pages)
        elif not starts_as_zeros(block):
            writer.zeros(block, addresses)
        self._done += piece.count * _PAGE
        self._talk.progress(phase="memory", done=self._done, total=self._total)
        if self._talk.stop.is_set():
            raise Cancelled("stopped while the guest's memory was read")

    @property
    def _total(self) -> int:
        return sum(one.size for one in self._regions)
