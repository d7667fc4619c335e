"""The private part of a manifest: metadata, digests, maps and small files.

4   length of the JSON, little endian
    JSON
    chunk table: a digest of 32 bytes for each chunk
    maps, in the order of the regions in the JSON (see chunk_map)
    small files, in the order of the files in the JSON
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.format.chunk_map import (
    MOST_CHUNKS,
    MOST_UNITS,
    SLOTS,
    UNIT,
    ZERO,
    Digests,
    Kind,
    Map,
    blocks,
    pack,
    units,
    unpack,
)
from vmckpt.store.format.metadata import (
    INSIDE,
    FileRow,
    Inside,
    Part,
    PrivateFacts,
    RegionRow,
    dumped,
    loaded,
)
from vmckpt.store.format.sealing import DIGEST, MOST
from vmckpt.units import Bytes

_LENGTH = 4
_LARGEST_JSON = 16 << 20
_LARGEST_FILES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionMap:
    """A RAM block or disk, and its map from units to chunks."""

    name: str
    kind: Kind
    size: Bytes
    map: Map


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Private:
    """The decoded private part of a manifest."""

    facts: PrivateFacts
    chunks: Sequence[bytes]
    """The chunk table: digests by index."""
    regions: tuple[RegionMap, ...]
    files: Mapping[str, bytes]
    """NVRAM and TPM files, by name."""

    def region(self, name: str) -> RegionMap | None:
        """Return the region with the given name; None if there is no such region."""
        return next((region for region in self.regions if region.name == name), None)


def written(private: Private, salt: bytes | None) -> bytes:
    """Encode the private part. Raises ValueError with a one-line message."""
    for region in private.regions:
        _fits(region, len(private.chunks))
    maps = [pack(region.map) for region in private.regions]
    rows = tuple(
        RegionRow(
            name=region.name,
            kind=region.kind,
            size=region.size,
            unit=UNIT[region.kind],
            map=len(packed),
        )
        for region, packed in zip(private.regions, maps, strict=True)
    )
    told = Inside(
        salt=None if salt is None else salt.hex(),
        chunks=len(private.chunks),
        regions=rows,
        files=tuple(FileRow(name=name, size=len(file)) for name, file in private.files.items()),
        facts=private.facts,
    )
    _check(told)
    text = dumped(INSIDE, told)
    if len(text) > _LARGEST_JSON:
        raise ValueError("its metadata is too large")
    chunks = Digests.of(private.chunks).raw
    head = len(text).to_bytes(_LENGTH, "little")
    return b"".join((head, text, chunks, *maps, *private.files.values()))


def read(data: memoryview) -> tuple[Private, bytes | None]:
    """Decode the private part. Returns the decoded part, and the domain's salt if encrypted.

    Raises ValueError or StoreDamaged with a one-line message.
    """
    length = int.from_bytes(data[:_LENGTH], "little")
    if length > min(_LARGEST_JSON, len(data)):
        raise ValueError("its metadata is too large")
    told = loaded(INSIDE, bytes(data[_LENGTH : _LENGTH + length]))
    _check(told)
    sizes = [told.chunks * DIGEST, *(row.map for row in told.regions)]
    sizes += [row.size for row in told.files]
    if _LENGTH + length + sum(sizes) != len(data):
        raise ValueError("its size does not match the lengths in its metadata")
    chunks, *rest = _cut(data[_LENGTH + length :], sizes)
    maps, files = rest[: len(told.regions)], rest[len(told.regions) :]
    regions = tuple(
        RegionMap(
            name=row.name,
            kind=row.kind,
            size=Bytes(row.size),
            map=unpack(packed, units(row.kind, row.size), told.chunks),
        )
        for row, packed in zip(told.regions, maps, strict=True)
    )
    return Private(
        facts=told.facts,
        chunks=Digests(chunks),
        regions=regions,
        files={row.name: bytes(file) for row, file in zip(told.files, files, strict=True)},
    ), None if told.salt is None else bytes.fromhex(told.salt)


def _cut(data: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return parts


def _check(told: Inside) -> None:
    """Check for contradictions, and for sizes that need too much memory. Raises ValueError."""
    if told.chunks > MOST_CHUNKS:
        raise ValueError("it has too many chunks")
    if sum(units(row.kind, row.size) for row in told.regions) > MOST_UNITS:
        raise ValueError("it is too large for one snapshot (1 TiB of memory, 16 TiB of disks)")
    if any(row.unit != UNIT[row.kind] for row in told.regions):
        raise ValueError("its unit size is not supported")
    if sum(row.size for row in told.files) > _LARGEST_FILES:
        raise ValueError("its NVRAM and TPM files are too large")
    _each_once("region", [row.name for row in told.regions])
    _each_once("file", [row.name for row in told.files])
    _each_once("part", [part.name for part in told.facts.stream])
    for part in told.facts.stream:
        if any(index >= told.chunks for index in part.chunks):
            raise ValueError(
                f'part "{part.name}" of its migration stream refers to a chunk that is not in the'
                " table"
            )
        if part.size > len(part.chunks) * MOST:
            raise ValueError(
                f'part "{part.name}" of its migration stream is larger than its chunks'
            )


def _each_once(what: str, names: Sequence[str]) -> None:
    twice = sorted(name for name in set(names) if names.count(name) > 1)
    if twice:
        raise ValueError(f"it has two {what}s named {twice[0]}")


def _fits(region: RegionMap, chunks: int) -> None:
    if len(region.map) != units(region.kind, region.size):
        raise ValueError(f"the length of the map of {region.name} does not match the region")
    for part in blocks(region.map):
        there = part[part != ZERO]
        if len(there) and int(there.max()) >= chunks * SLOTS:
            raise ValueError(f"the map of {region.name} refers to a chunk that is not in the table")


Flags = NDArray[np.bool_]


def compacted(private: Private) -> Private:
    """Remove unused chunks, to which no map or stream refers, from the table. Returns the result.

    A chunk of the parent becomes unused if some units of a group were first mapped to that chunk,
    and then the complete group was stored again. Garbage collection would keep unused chunks,
    because the manifest lists them. The maps are changed in place, because a second map of a 64 GiB
    region would take 64 MiB.
    """
    used: Flags = np.zeros(len(private.chunks), dtype=bool)
    for region in private.regions:
        for part in blocks(region.map):
            used[part[part != ZERO] // np.uint32(SLOTS)] = True
    for stream in private.facts.stream:
        used[list(stream.chunks)] = True
    if used.all():
        return private
    places = np.cumsum(used, dtype=np.uint32) - np.uint32(1)
    for region in private.regions:
        _rename(region.map, places)
    return replace(
        private,
        chunks=Digests(Digests.of(private.chunks).array()[used].tobytes()),
        facts=replace(
            private.facts, stream=tuple(_renamed(part, places) for part in private.facts.stream)
        ),
    )


def _rename(map_: Map, places: NDArray[np.uint32]) -> None:
    for block in blocks(map_):
        there = block != ZERO
        old = block[there]
        block[there] = places[old // np.uint32(SLOTS)] * np.uint32(SLOTS) + old % np.uint32(SLOTS)


def _renamed(part: Part, places: NDArray[np.uint32]) -> Part:
    return replace(part, chunks=tuple(int(places[index]) for index in part.chunks))
