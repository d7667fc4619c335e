"""What a pack holds, and what is none."""

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import BadInput, StoreDamaged, StoreNewer
from vmckpt.store.format import pack as format_pack

PACK = format_pack.encode([(bytes([n]) * 32, bytes([n]) * n, 9) for n in range(1, 9)], b"n" * 16, 3)
ID = blake3(PACK).hexdigest()


def test_a_pack_tells_what_it_holds() -> None:
    index = format_pack.parse(ID, PACK)
    assert index.generation == 3
    assert [(row["name"].tobytes()[0], row["length"]) for row in index.rows] == [
        (n, n) for n in range(1, 9)
    ]
    assert format_pack.parse_tail(
        PACK[-format_pack.tail_length(PACK[-format_pack.FOOTER :]) :], len(PACK)
    ).rows.size


def test_a_pack_with_any_bit_changed_is_refused() -> None:
    for at in range(8 * len(PACK)):
        bad = bytearray(PACK)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises(StoreDamaged):
            format_pack.parse(ID, bytes(bad))


@given(st.binary(max_size=300), st.integers(0, 400))
def test_nonsense_is_no_pack(data: bytes, size: int) -> None:
    # Before the magic at the end of a pack, random bytes may be the number of a newer version.
    with pytest.raises((StoreDamaged, StoreNewer)):
        format_pack.parse_tail(data + PACK[-8:] * (size % 2), size)
    assert len(format_pack.salvage(data)[0]) == 0


def test_what_is_no_chunk_is_refused() -> None:
    for name, box, plain in ((b"", b"", 1), (b"n" * 32, b"", 0), (b"n" * 32, b"", 5 << 20)):
        with pytest.raises(BadInput):
            format_pack.checked_box(name, box, plain)
