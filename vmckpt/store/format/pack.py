"""Packs: many sealed chunks in one object. Pure.

    header   magic, version, 16 random bytes
    chunks   sealed chunks, one after another
    index    one row per sealed chunk, in order: name, offset, length, plain length, hash
    footer   hash of index and footer, number of rows, generation, version, magic

A pack's ID is the BLAKE3 of the complete pack, so every change is detected. Because of the random
bytes, two packs with the same chunks have different IDs. Otherwise a writer could rely on a new
pack while a garbage collection is removing an old pack with the same ID. A reader that knows a
pack's size locates the index from the end of the pack.

A *foreign* pack contains encrypted chunks that came from another store and could not be decrypted
here. It is unknown whether these chunks match their names. Therefore only the snapshots that
arrived with a foreign pack rely on its chunks. A foreign pack has version 2. Its format is
otherwise the same. See docs/formats.md.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from vmckpt.errors import BadInput, StoreDamaged, StoreNewer

VERSION = 1
FOREIGN = 2
"""The version number of foreign packs; also the newest version."""
NAME = 32
HASH = 16
MOST_PLAIN = 4 << 20
"""Maximum plain size of a chunk in bytes: 64 units of a disk."""
MOST_BOX = MOST_PLAIN + (64 << 10)
ROW = np.dtype(
    [
        ("name", f"V{NAME}"), ("offset", "<u4"), ("length", "<u4"), ("plain", "<u4"),
        ("hash", f"V{HASH}"),
    ]
)  # fmt: skip
Rows = NDArray[Any]
"""Rows of an index: an array of dtype ROW."""

_HEADER = struct.Struct("<8sII16s")
_FOOTER = struct.Struct("<32sIIII8s")
_BEGIN, _END = b"vmckptPK", b"KPtpkcmv"
HEADER, FOOTER = _HEADER.size, _FOOTER.size


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a pack."""

    generation: int
    """How often the chunks were rewritten.

    0 for a writer's pack; for a rewritten pack, 1 more than the highest generation of the packs
    from which it was rewritten.
    """
    rows: Rows
    foreign: bool = False
    """Whether the chunks came from another store and could not be compared with their names."""


def key_of(pack: str) -> str:
    """Return the key of a pack's object."""
    return f"packs/{pack[:2]}/{pack}"


def pack_of(key: str) -> str | None:
    """Return the pack ID in an object's key; None if the key is not the key of a pack."""
    pack = key.rpartition("/")[2]
    good = len(pack) == 64 and not set(pack) - set("0123456789abcdef")
    return pack if good and key == key_of(pack) else None


def box_hash(box: bytes | memoryview) -> bytes:
    """Return the hash of a sealed chunk. The hash allows the chunk to be verified without a key."""
    return blake3(box).digest(HASH)


def header(nonce: bytes, *, foreign: bool = False) -> bytes:
    """Return the first bytes of a pack. `nonce` is 16 random bytes; `foreign`: see `Index`."""
    return _HEADER.pack(_BEGIN, _version(foreign), 0, nonce)


def tail(rows: Rows, generation: int, *, foreign: bool = False) -> bytes:
    """Return the last bytes of a pack: index and footer. `generation`, `foreign`: see `Index`."""
    index, version = rows.tobytes(), _version(foreign)
    return index + _FOOTER.pack(
        _index_hash(index, generation, version), len(rows), generation, version, 0, _END
    )


def row(name: bytes, offset: int, box: bytes | memoryview, plain: int) -> tuple[Any, ...]:
    """Return the index row of a sealed chunk. `plain` is the chunk's length before sealing."""
    return (name, offset, len(box), plain, box_hash(box))


def encode(
    boxes: list[tuple[bytes, bytes, int]], nonce: bytes, generation: int = 0, *,
    foreign: bool = False,
) -> bytes:  # fmt: skip
    """Build a complete pack from sealed chunks, given as (name, sealed chunk, plain length).

    `nonce` is 16 random bytes. `generation`, `foreign`: see `Index`.
    """
    parts, rows, at = [header(nonce, foreign=foreign)], [], HEADER
    for name, box, plain in boxes:
        rows.append(row(name, at, box, plain))
        parts.append(box)
        at += len(box)
    return b"".join([*parts, tail(np.array(rows, dtype=ROW), generation, foreign=foreign)])


def tail_length(footer: bytes) -> int:
    """Return the length of index and footer in bytes. Raises StoreDamaged, StoreNewer."""
    return FOOTER + _parsed_footer(footer)[1] * ROW.itemsize


def parse_tail(data: bytes, size: int) -> Index:
    """Parse the index of a pack.

    `data` contains the last bytes of the pack: at least the index and the footer. `size` is the
    size of the complete pack. Raises StoreDamaged, StoreNewer.
    """
    digest, count, generation, version = _parsed_footer(data[-FOOTER:])
    length = count * ROW.itemsize
    if HEADER + length + FOOTER > size or length + FOOTER > len(data):
        raise StoreDamaged("its index is larger than the pack")
    index = data[len(data) - FOOTER - length : len(data) - FOOTER]
    if _index_hash(index, generation, version) != digest:
        raise StoreDamaged("the checksum of its index is wrong")
    rows = np.frombuffer(index, dtype=ROW)
    lengths = rows["length"].astype(np.int64)
    ends = HEADER + np.cumsum(lengths)
    if (
        (rows["offset"].astype(np.int64) != ends - lengths).any()
        or (int(ends[-1]) if count else HEADER) != size - length - FOOTER
        or (rows["plain"] > MOST_PLAIN).any()
        or (lengths > MOST_BOX).any()
    ):
        raise StoreDamaged("its index does not match its chunks")
    return Index(generation, rows, version == FOREIGN)


def parse(pack: str, data: bytes) -> Index:
    """Verify every bit of a complete pack, and return the pack's index.

    `pack`: its ID, which is the BLAKE3 hash of `data` in hex digits. Raises StoreDamaged,
    StoreNewer.
    """
    whole = blake3(data).hexdigest() == pack
    try:
        index = _walked(data)
    except StoreNewer as exc:
        if whole:
            raise
        raise StoreDamaged("its content does not match its name") from exc
    if not whole:
        raise StoreDamaged("its content does not match its name")
    return index


def _walked(data: bytes) -> Index:
    if len(data) < HEADER + FOOTER:
        raise StoreDamaged("the pack is too short")
    magic, version, zero, _ = _HEADER.unpack(data[:HEADER])
    if magic == _BEGIN and version > FOREIGN:
        raise StoreNewer(
            f"the pack has version {version}; this vmckpt supports versions up to {FOREIGN}"
        )
    if magic != _BEGIN or zero:
        raise StoreDamaged("its header is damaged")
    index = parse_tail(data, len(data))
    if version != _version(index.foreign):
        raise StoreDamaged("its header is damaged")
    view = memoryview(data)
    for name, offset, length, _, told in index.rows.tolist():
        if box_hash(view[offset : offset + length]) != told:
            raise StoreDamaged(f"chunk {name.hex()[:16]} at offset {offset} is damaged")
    return index


def salvage(data: bytes) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Return the names of the intact and of the damaged chunks in a damaged pack.

    Returns two empty arrays if the index is damaged or of a newer version.
    """
    try:
        rows = parse_tail(data, len(data)).rows
    except (StoreDamaged, StoreNewer):
        none = np.zeros(0, dtype=f"V{NAME}")
        return none, none
    view = memoryview(data)
    good = np.array(
        [
            box_hash(view[offset : offset + length]) == told
            for _, offset, length, _, told in rows.tolist()
        ],
        dtype=bool,
    )
    return rows["name"][good], rows["name"][~good]


def checked_box(name: bytes, box: bytes | memoryview, plain: int) -> None:
    """Check a sealed chunk's name and sizes. Raises BadInput.

    `box`: the sealed chunk; `plain`: its length before sealing, in bytes.
    """
    if len(name) != NAME or len(box) > MOST_BOX or not 0 < plain <= MOST_PLAIN:
        raise BadInput(
            f"invalid chunk of {plain} bytes, sealed {len(box)} bytes, with a name of {len(name)}"
            f" bytes; valid: 1 to {MOST_PLAIN}, at most {MOST_BOX}, and {NAME}"
        )


def _version(foreign: bool) -> int:
    return FOREIGN if foreign else VERSION


def _parsed_footer(footer: bytes) -> tuple[bytes, int, int, int]:
    if len(footer) < FOOTER:
        raise StoreDamaged("the pack is too short")
    digest, count, generation, version, zero, magic = _FOOTER.unpack(footer)
    if magic != _END:
        raise StoreDamaged("the pack does not end with a pack footer")
    if version > FOREIGN:
        raise StoreNewer(
            f"the pack has version {version}; this vmckpt supports versions up to {FOREIGN}"
        )
    if version not in (VERSION, FOREIGN) or zero:
        raise StoreDamaged("its footer is damaged")
    return digest, count, generation, version


def _index_hash(index: bytes, generation: int, version: int) -> bytes:
    count = len(index) // ROW.itemsize
    footer = _FOOTER.pack(bytes(NAME), count, generation, version, 0, _END)
    return blake3(index).update(footer).digest()
