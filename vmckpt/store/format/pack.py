"""Packs: many sealed chunks in one object. Pure.

    header   magic, version, 16 random bytes
    boxes    one after the other
    index    a row per box, in their order: name, offset, length, plain length, box hash
    footer   hash of index and footer, number of rows, generation, version, magic

A pack's id is the BLAKE3 of all of it, so nothing in it can change unseen; the random bytes keep
two packs of the same boxes from being one object, which one writer could use while a collection
removes what it takes for another one's. A reader that knows the size finds the index from the end.

A *foreign* pack holds boxes that another store gave and that nobody here could open: whether they
are what their names say is not known, so nobody counts on them but the snapshots they came with. It
has version 2, and is the same otherwise. docs/formats.md tells the rest.
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
"""The version of a foreign pack, and the newest there is."""
NAME = 32
HASH = 16
MOST_PLAIN = 4 << 20
"""Bytes of the largest chunk: 64 units of a disk."""
MOST_BOX = MOST_PLAIN + (64 << 10)
ROW = np.dtype(
    [
        ("name", f"V{NAME}"), ("offset", "<u4"), ("length", "<u4"), ("plain", "<u4"),
        ("hash", f"V{HASH}"),
    ]
)  # fmt: skip
Rows = NDArray[Any]
"""Rows of an index: an array of ROW."""

_HEADER = struct.Struct("<8sII16s")
_FOOTER = struct.Struct("<32sIIII8s")
_BEGIN, _END = b"vmckptPK", b"KPtpkcmv"
HEADER, FOOTER = _HEADER.size, _FOOTER.size


@dataclass(frozen=True, slots=True)
class Index:
    """What a pack says of itself."""

    generation: int
    """0: a writer made it; otherwise one more than the packs it was rewritten from."""
    rows: Rows
    foreign: bool = False
    """It came from another store, and nobody could see whether its boxes fit their names."""


def key_of(pack: str) -> str:
    """The object of a pack."""
    return f"packs/{pack[:2]}/{pack}"


def pack_of(key: str) -> str | None:
    """The pack that an object is; None if its name is not one of a pack."""
    pack = key.rpartition("/")[2]
    good = len(pack) == 64 and not set(pack) - set("0123456789abcdef")
    return pack if good and key == key_of(pack) else None


def box_hash(box: bytes | memoryview) -> bytes:
    """What the index tells of a box, for whoever has no key."""
    return blake3(box).digest(HASH)


def header(nonce: bytes, *, foreign: bool = False) -> bytes:
    """The first bytes of a pack."""
    return _HEADER.pack(_BEGIN, _version(foreign), 0, nonce)


def tail(rows: Rows, generation: int, *, foreign: bool = False) -> bytes:
    """The last bytes of a pack: index and footer."""
    index, version = rows.tobytes(), _version(foreign)
    return index + _FOOTER.pack(
        _index_hash(index, generation, version), len(rows), generation, version, 0, _END
    )


def row(name: bytes, offset: int, box: bytes | memoryview, plain: int) -> tuple[Any, ...]:
    """What the index tells of one box."""
    return (name, offset, len(box), plain, box_hash(box))


def encode(
    boxes: list[tuple[bytes, bytes, int]], nonce: bytes, generation: int = 0, *,
    foreign: bool = False,
) -> bytes:  # fmt: skip
    """A whole pack of (name, box, plain length)."""
    parts, rows, at = [header(nonce, foreign=foreign)], [], HEADER
    for name, box, plain in boxes:
        rows.append(row(name, at, box, plain))
        parts.append(box)
        at += len(box)
    return b"".join([*parts, tail(np.array(rows, dtype=ROW), generation, foreign=foreign)])


def tail_length(footer: bytes) -> int:
    """How long index and footer are. Raises StoreDamaged, StoreNewer."""
    return FOOTER + _parsed_footer(footer)[1] * ROW.itemsize


def parse_tail(data: bytes, size: int) -> Index:
    """Index and footer of a pack of that size, from its last bytes: at least those.

    Raises StoreDamaged, StoreNewer.
    """
    digest, count, generation, version = _parsed_footer(data[-FOOTER:])
    length = count * ROW.itemsize
    if HEADER + length + FOOTER > size or length + FOOTER > len(data):
        raise StoreDamaged("its index is longer than it")
    index = data[len(data) - FOOTER - length : len(data) - FOOTER]
    if _index_hash(index, generation, version) != digest:
        raise StoreDamaged("its index is not what was written")
    rows = np.frombuffer(index, dtype=ROW)
    lengths = rows["length"].astype(np.int64)
    ends = HEADER + np.cumsum(lengths)
    if (
        (rows["offset"].astype(np.int64) != ends - lengths).any()
        or (int(ends[-1]) if count else HEADER) != size - length - FOOTER
        or (rows["plain"] > MOST_PLAIN).any()
        or (lengths > MOST_BOX).any()
    ):
        raise StoreDamaged("its index does not fit its boxes")
    return Index(generation, rows, version == FOREIGN)


def parse(pack: str, data: bytes) -> Index:
    """A whole pack, with every bit of it checked. Raises StoreDamaged, StoreNewer."""
    whole = blake3(data).hexdigest() == pack
    try:
        index = _walked(data)
    except StoreNewer as exc:
        if whole:
            raise
        raise StoreDamaged("its version is not what was written") from exc
    if not whole:
        raise StoreDamaged("its bytes are not those that its name tells of")
    return index


def _walked(data: bytes) -> Index:
    if len(data) < HEADER + FOOTER:
        raise StoreDamaged("it is too short")
    magic, version, zero, _ = _HEADER.unpack(data[:HEADER])
    if magic == _BEGIN and version > FOREIGN:
        raise StoreNewer(f"it has version {version}; this vmckpt knows {FOREIGN}")
    if magic != _BEGIN or zero:
        raise StoreDamaged("its beginning is not what was written")
    index = parse_tail(data, len(data))
    if version != _version(index.foreign):
        raise StoreDamaged("its beginning is not what was written")
    view = memoryview(data)
    for name, offset, length, _, told in index.rows.tolist():
        if box_hash(view[offset : offset + length]) != told:
            raise StoreDamaged(f"the box of chunk {name.hex()[:16]} at {offset} is damaged")
    return index


def salvage(data: bytes) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """The names of boxes that are whole in a pack that is not, and of those that are lost.

    Of a pack whose index is damaged nothing is known.
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
    """Raises BadInput for what no pack may hold."""
    if len(name) != NAME or len(box) > MOST_BOX or not 0 < plain <= MOST_PLAIN:
        raise BadInput(f"a chunk of {plain} bytes is no chunk; at most {MOST_PLAIN} make one")


def _version(foreign: bool) -> int:
    return FOREIGN if foreign else VERSION


def _parsed_footer(footer: bytes) -> tuple[bytes, int, int, int]:
    if len(footer) < FOOTER:
        raise StoreDamaged("it is too short")
    digest, count, generation, version, zero, magic = _FOOTER.unpack(footer)
    if magic != _END:
        raise StoreDamaged("its end is not one of a pack")
    if version > FOREIGN:
        raise StoreNewer(f"it has version {version}; this vmckpt knows {FOREIGN}")
    if version not in (VERSION, FOREIGN) or zero:
        raise StoreDamaged("its end is not what was written")
    return digest, count, generation, version


def _index_hash(index: bytes, generation: int, version: int) -> bytes:
    count = len(index) // ROW.itemsize
    footer = _FOOTER.pack(bytes(NAME), count, generation, version, 0, _END)
    return blake3(index).update(footer).digest()
