import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.support.snapshots import maps
from vmckpt.errors import StoreDamaged
from vmckpt.store.format.chunk_map import (
    MOST_CHUNKS,
    MOST_UNITS,
    ZERO,
    Digests,
    Map,
    ascending,
    ordered,
    pack,
    unpack,
)

NAMES = st.lists(st.binary(min_size=32, max_size=32), max_size=20)


def framed(plain: bytes) -> bytes:
    frame = zstandard.ZstdCompressor().compress(plain)
    return len(frame).to_bytes(4, "little") + frame


@given(maps(1000))
def test_a_map_comes_back_as_it_was(map_: Map) -> None:
    assert unpack(memoryview(pack(map_)), len(map_), 1000).tolist() == map_.tolist()


@pytest.mark.parametrize("count", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_map_of_many_blocks_comes_back_and_is_small(count: int) -> None:
    map_ = np.arange(count, dtype=np.uint32)
    map_[count // 3 : count // 2] = ZERO
    packed = pack(map_)

    assert np.array_equal(unpack(memoryview(packed), count, count // 64 + 1), map_)
    assert len(packed) < 200 + count / 1000


def test_the_largest_chunk_index_is_no_zero() -> None:
    map_ = np.array([(MOST_CHUNKS - 1) * 64 + 63, ZERO, 0], dtype=np.uint32)

    assert unpack(memoryview(pack(map_)), 3, MOST_CHUNKS).tolist() == map_.tolist()


@pytest.mark.parametrize(
    ("data", "count", "what"),
    [
        pytest.param(b"", 1, "truncated", id="nothing"),
        pytest.param(b"\xff\xff\xff\xff", 1, "truncated", id="long"),
        pytest.param(b"x", 0, "trailing bytes", id="more"),
        pytest.param(b"\x04\0\0\0abcd", 1, "decompressed", id="no frame"),
        pytest.param(framed(b""), 1, "truncated", id="no bits"),
        pytest.param(framed(b"\xc0"), 1, "does not match", id="bits too many"),
        pytest.param(framed(b"\x80"), 1, "does not match", id="no number"),
        pytest.param(framed(b"\x00\0\0\0\0"), 1, "does not match", id="number too many"),
        pytest.param(framed(b"\x80\x40\0\0\0"), 1, "does not have", id="no such chunk"),
        pytest.param(framed(b"\x80\xff\xff\xff\xff"), 1, "does not have", id="zero by number"),
        pytest.param(framed(bytes(1 << 24)), 1, "too long for its region", id="bomb"),
        pytest.param(b"", MOST_UNITS + 1, "units", id="too large"),
        pytest.param(b"", -1, "units", id="negative"),
    ],
)
def test_what_is_no_map_is_refused(data: bytes, count: int, what: str) -> None:
    with pytest.raises(StoreDamaged, match=what):
        unpack(memoryview(data), count, 1)


@given(st.binary(max_size=200), st.integers(0, 1 << 22), st.integers(0, 5))
def test_noise_is_a_map_or_is_refused(data: bytes, count: int, chunks: int) -> None:
    for tried in (data, framed(data)):
        try:
            map_ = unpack(memoryview(tried), count, chunks)
        except StoreDamaged:
            continue
        assert len(map_) == count
        assert all(one < chunks * 64 for one in map_[map_ != ZERO].tolist())


@given(NAMES)
def test_names_are_ordered_and_each_is_there_once(names: list[bytes]) -> None:
    assert list(ordered(names)) == sorted(set(names))
    assert ascending(ordered(names))
    assert ascending(Digests.of(names)) == (names == sorted(set(names)))


@given(st.binary(min_size=32, max_size=32), st.integers(0, 255))
def test_names_that_differ_in_one_bit_are_ordered(name: bytes, bit: int) -> None:
    other = bytearray(name)
    other[bit // 8] ^= 1 << bit % 8
    lower, higher = sorted((name, bytes(other)))

    assert ascending(Digests(lower + higher))
    assert not ascending(Digests(higher + lower))


@given(NAMES)
def test_digests_are_a_sequence(names: list[bytes]) -> None:
    digests = Digests.of(names)

    assert list(digests) == names == [digests[at] for at in range(len(names))]
    assert digests[1:5] == names[1:5]
    assert [one.tobytes() for one in digests.array()] == names
    assert digests == Digests.of(digests)
    with pytest.raises(IndexError):
        digests[len(names)]
    with pytest.raises(ValueError, match="not a multiple of the digest length"):
        Digests(b"x")
