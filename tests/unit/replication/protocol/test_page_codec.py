import struct
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.replication.protocol import framing
from vmckpt.replication.protocol.messages import Damaged, Pages
from vmckpt.replication.protocol.page_codec import (
    MOST_PAGES,
    MOST_STATE,
    Numbers,
    Whole,
    decode,
    decode_state,
    digests,
    encode,
    encode_state,
)

SEED = st.integers(0, 1 << 32)
KINDS = st.lists(st.sampled_from(["zero", "same", "some", "half", "all"]), max_size=40)
FULL = b"\xff" * 64


def random(count: int, seed: int = 1) -> Whole:
    return np.random.default_rng(seed).integers(0, 1 << 64, (count, 512), dtype=np.uint64)


def made(kinds: list[str], seed: int) -> tuple[Numbers, Whole, Whole]:
    """Numbers that rise, pages, and the ones before; each page changed as its kind says."""
    rng = np.random.default_rng(seed)
    old = random(len(kinds), seed)
    old[rng.random(len(kinds)) < 0.3] = 0
    new = old.copy()
    for at, kind in enumerate(kinds):
        words = {"zero": 0, "same": 0, "some": 8, "half": 256, "all": 512}[kind]
        where = rng.choice(512, words, replace=False)
        new[at, where] = rng.integers(0, 1 << 64, words, dtype=np.uint64)
        if kind == "zero":
            new[at] = 0
    numbers = np.cumsum(rng.integers(1, 1000, len(kinds))) - 1
    return numbers.astype(np.intp), new, old


def known_as(numbers: Numbers, old: Whole) -> Callable[[Numbers], Whole]:
    def previous(wanted: Numbers) -> Whole:
        assert np.isin(wanted, numbers).all()
        return old[np.searchsorted(numbers, wanted)]

    return previous


def nothing(_: Numbers) -> Whole:
    raise AssertionError("nobody packed against anything")


def unpacked(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def packed(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


def batch(count: int, left_out: list[int], kinds: list[int], rest: bytes = b"") -> bytes:
    return packed(struct.pack(f"<I{len(left_out)}I", count, *left_out) + bytes(kinds) + rest)


@given(KINDS, SEED, st.booleans(), st.sampled_from([-1, 1, 3]))
def test_pages_come_back_as_they_were(kinds: list[str], seed: int, known: bool, level: int) -> None:
    numbers, new, old = made(kinds, seed)
    data = encode(numbers, new, old if known else None, level=level)
    found, pages = decode(data, known_as(numbers, old) if known else nothing, pages=40_000)

    assert np.array_equal(found, numbers)
    assert found.dtype == np.intp
    assert pages.shape == (len(kinds), 512)
    assert np.array_equal(pages, new)


def test_many_stretches_of_mixed_pages_come_back() -> None:
    numbers, new, old = made(["zero", "some", "all", "same", "half"] * 300, 5)

    found, pages = decode(encode(numbers, new, old), known_as(numbers, old), pages=2_000_000)

    assert np.array_equal(found, numbers)
    assert np.array_equal(pages, new)


def test_what_was_there_before_is_left_alone() -> None:
    numbers, old = np.arange(5), random(5)
    new, kept = old + np.eye(5, 512, dtype=np.uint64), old.copy()

    assert np.array_equal(decode(encode(numbers, new, old), lambda _: old, pages=5)[1], new)
    assert np.array_equal(old, kept)


def test_zero_pages_cost_next_to_nothing() -> None:
    numbers = np.arange(4000, dtype=np.intp)

    assert len(encode(numbers, np.zeros((4000, 512), dtype=np.uint64), random(4000))) < 60


def test_a_page_with_8_changed_words_costs_little_more_than_them() -> None:
    old = random(1000)
    new = old.copy()
    new[:, 8:16] ^= random(1000, 2)[:, :8]

    assert len(encode(np.arange(1000), new, old)) < 1000 * (8 * 8 + 4)


def test_pages_that_cannot_be_compressed_grow_by_less_than_2_percent() -> None:
    assert len(encode(np.arange(500), random(500), None)) < 500 * 4096 * 1.02
    assert len(encode(np.arange(500), random(500), random(500, 2))) < 500 * 4096 * 1.02


def test_a_page_that_became_quite_another_is_not_told_by_what_it_was() -> None:
    text = np.frombuffer(b"all work and no play makes jack a dull boy. " * 100, np.uint64)[:512]
    new = np.tile(text, (100, 1))

    alone = encode(np.arange(100), new, None)

    assert encode(np.arange(100), new, random(100)) == alone


def test_the_longest_batch_fits_into_a_message_whatever_it_holds() -> None:
    data = encode(np.arange(MOST_PAGES), random(MOST_PAGES), None)

    assert framing.parts(Pages(epoch=1, file=0, data=data), token=1)[1] is data
    assert len(decode(data, nothing, pages=MOST_PAGES)[1]) == MOST_PAGES


@pytest.mark.parametrize(
    ("numbers", "shape"),
    [
        pytest.param([3, 2], (2, 512), id="falling"),
        pytest.param([2, 2], (2, 512), id="twice"),
        pytest.param([-1, 2], (2, 512), id="negative"),
        pytest.param([0, 1 << 33], (2, 512), id="far apart"),
        pytest.param([0], (2, 512), id="too few"),
        pytest.param([0], (1, 511), id="no pages"),
        pytest.param(range(MOST_PAGES + 1), (MOST_PAGES + 1, 512), id="too many"),
    ],
)
def test_what_is_no_batch_is_not_packed(numbers: list[int], shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="numbers"):
        encode(np.array(numbers, dtype=np.intp), np.zeros(shape, dtype=np.uint64), None)


def test_one_page_before_is_not_taken_for_all() -> None:
    with pytest.raises(ValueError, match="old pages have shape"):
        encode(np.arange(3), random(3), random(1))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        pytest.param(b"", "decompressed", id="nothing"),
        pytest.param(b"no frame", "decompressed", id="no frame"),
        pytest.param(packed(b"abc"), "truncated", id="no count"),
        pytest.param(batch(2, [0], [1]), "2 pages in 9 bytes", id="numbers cut off"),
        pytest.param(batch(MOST_PAGES + 1, [0] * 10_000, []), "8001 pages", id="too many"),
        pytest.param(batch(2, [3, 6], [0, 0]), "page 10 of a file with 10 pages", id="beyond"),
        pytest.param(
            batch(1, [0xFFFFFFFF], [0]), "page 4294967295 of a file with 10 pages", id="far beyond"
        ),
        pytest.param(batch(1, [0], [3]), "unknown kind", id="kind"),
        pytest.param(batch(1, [0], [1], b"x" * 63), "truncated maps", id="maps cut off"),
        pytest.param(batch(1, [0], [1], FULL + bytes(4095)), "do not match", id="words cut off"),
        pytest.param(batch(1, [0], [1], FULL + bytes(4104)), "do not match", id="words too many"),
        pytest.param(batch(1, [0], [0], bytes(8)), "do not match", id="words of a zero page"),
        pytest.param(batch(0, [], [], b"x"), "do not match", id="words of no page"),
        pytest.param(packed(bytes(1 << 26)), "compressed data of more than", id="bomb"),
        pytest.param(batch(0, [], []) + b"x", "decompressed", id="something behind it"),
    ],
)
def test_what_is_no_batch_is_damaged(data: bytes, what: str) -> None:
    with pytest.raises(Damaged, match=what):
        decode(data, nothing, pages=10)


def test_a_frame_that_does_not_say_how_long_it_is_is_damaged() -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False)

    with pytest.raises(Damaged, match="unknown size"):
        decode(packer.compress(bytes(4)), nothing, pages=10)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_damaged_or_a_batch(garbage: bytes, plain: bool) -> None:
    try:
        numbers, pages = decode(
            packed(garbage) if plain else garbage,
            lambda wanted: np.zeros((len(wanted), 512), dtype=np.uint64),
            pages=1000,
        )
    except Damaged:
        return
    assert pages.shape == (len(numbers), 512)


@given(KINDS, SEED, st.data())
def test_a_batch_with_a_wrong_byte_inside_is_damaged_or_has_pages_that_there_are(
    kinds: list[str], seed: int, data: st.DataObject
) -> None:
    numbers, new, old = made(kinds[:4], seed)
    plain = bytearray(unpacked(encode(numbers, new, old)))
    plain[data.draw(st.integers(0, min(len(plain) - 1, 300)))] = data.draw(st.integers(0, 255))
    try:
        found, pages = decode(packed(bytes(plain)), lambda n: random(len(n)), pages=4000)
    except Damaged:
        return
    assert pages.shape == (len(found), 512)
    assert (np.diff(found, prepend=-1) > 0).all()
    assert (found < 4000).all()


@given(st.binary(max_size=2000), st.none() | st.binary(max_size=2000))
def test_device_state_comes_back_as_it_was(state: bytes, previous: bytes | None) -> None:
    assert decode_state(encode_state(state, previous), previous) == state


@pytest.mark.parametrize("size", [50_000, 700_000, 3_000_000])
def test_device_state_that_changed_little_and_moved_is_small(size: int) -> None:
    previous = random(size // 4096).tobytes()
    state = bytearray(previous[:1000] + b"moved" + previous[1000:])
    for at in range(0, len(state), len(state) // 20):
        state[at] ^= 1
    data = encode_state(bytes(state), previous)

    assert decode_state(data, previous) == state
    assert len(data) < 1000 + size // 1000


@pytest.mark.parametrize("other", [None, b"", b"another", b"previous state "])
def test_device_state_against_another_one_is_damaged(other: bytes | None) -> None:
    data = encode_state(b"state", b"previous state")

    with pytest.raises(Damaged, match="does not follow the last device state"):
        decode_state(data, other)


def test_a_device_state_that_follows_none_is_read_whatever_was_before() -> None:
    """So a primary that does not know what the backup has can go on."""
    data = encode_state(b"state", None)

    assert decode_state(data, b"previous state") == decode_state(data, None) == b"state"


@given(st.binary(max_size=100))
def test_garbage_is_no_device_state(garbage: bytes) -> None:
    for data in (garbage, bytes(16) + garbage, bytes(16) + packed(garbage + b"x")[:-1]):
        with pytest.raises(Damaged):
            decode_state(data, None)


def test_device_state_is_never_longer_than_allowed() -> None:
    bomb = zstandard.ZstdCompressor().compressobj(size=MOST_STATE + 1)
    piece = bytes(1 << 24)
    frame = b"".join(bomb.compress(piece) for _ in range(MOST_STATE // len(piece)))
    frame += bomb.compress(b"x") + bomb.flush()

    with pytest.raises(Damaged, match=f"compressed data of more than {MOST_STATE} bytes"):
        decode_state(bytes(16) + frame, None)


def test_pages_have_one_digest_only_if_they_are_the_same() -> None:
    pages = random(300)
    pages[7] = 0
    pages[[11, 200]] = pages[3]
    pages[12] = pages[4]
    pages[12, 511] ^= np.uint64(1 << 63)
    found = digests(pages)

    assert found.shape == (300,)
    assert found.dtype == np.uint64
    assert len(set(found.tolist())) == 298
    assert found[3] == found[11] == found[200]
    assert digests(pages[7:8]) == digests(np.zeros((1, 512), dtype=np.uint64)) == found[7]


def test_a_digest_is_the_beginning_of_its_pages_blake3() -> None:
    pages = np.zeros((2, 512), dtype=np.uint64)
    pages[1] = np.arange(512)

    told = [blake3(page.astype("<u8").tobytes()).digest(8) for page in pages]

    assert digests(pages).astype("<u8").tobytes() == b"".join(told)
