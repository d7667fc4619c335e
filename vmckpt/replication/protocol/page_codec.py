"""Encode pages and device state as differences from the other end's data. Pure.

For each page, only the nonzero words are sent, with a map of their positions. They are words of the
page itself, or of the page XOR its previous content. A batch is one zstd frame. It contains, little
endian: the number of pages, u32; for each page, how many page numbers are skipped before it, u32;
for each page, its kind, u8; for each page that is not all zeros, its map, 64 bytes; all words.
"""

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.replication.protocol.messages import DIGEST, damaged, digest

Numbers: TypeAlias = NDArray[np.intp]
Whole: TypeAlias = NDArray[np.uint64]
"""Complete pages: shape (n, 512)."""
Small: TypeAlias = NDArray[np.uint8]
Previous: TypeAlias = Callable[[Numbers], Whole]
"""Returns the previous content of the pages with these numbers."""

MOST_PAGES = 8000
"""Maximum number of pages in a batch, which then fits into one message whatever the content."""
MOST_STATE = 256 << 20
"""Maximum size of a device state, in bytes."""

_WORDS = PAGE // 8
_MAP = _WORDS // 8
_ZERO, _PLAIN, _XOR = range(3)
_COUNT = struct.Struct("<I")
_PER_PAGE = 4 + 1
# Number of pages to process at a time: 1 MiB, small enough that memory is reused instead of newly
# mapped each time.
_STRETCH = 256
_NOTHING = bytes(DIGEST)


def encode(numbers: Numbers, new: Whole, old: Whole | None, *, level: int = 1) -> bytes:
    """Encode pages; `numbers` must be sorted. `old`: the other end's content; None: unknown.

    Raises ValueError for more than `MOST_PAGES` pages, numbers that do not increase, and wrong
    shapes.
    """
    left_out = np.diff(numbers, prepend=-1) - 1
    if len(numbers) > MOST_PAGES or new.shape != (len(numbers), _WORDS):
        raise ValueError(
            f"invalid batch: {len(numbers)} page numbers, but pages of shape {new.shape}; at most"
            f" {MOST_PAGES} pages are allowed"
        )
    if old is not None and old.shape != new.shape:
        raise ValueError(f"old pages have shape {old.shape}, but new pages have {new.shape}")
    if len(numbers) and not 0 <= left_out.min() <= left_out.max() < 1 << 32:
        raise ValueError("the page numbers do not increase, or increase by too much")
    packed = [
        _pack(new[first : first + _STRETCH], None if old is None else old[first : first + _STRETCH])
        for first in range(0, len(numbers), _STRETCH)
    ]
    # Arrays are buffers, but numpy's types declare that only for newer Pythons.
    told: list[Any] = [_COUNT.pack(len(numbers)), left_out.astype("<u4")]
    told += [piece for pieces in zip(*packed, strict=True) for piece in pieces]
    return zstandard.ZstdCompressor(level=level).compress(b"".join(told))


def _pack(new: Whole, old: Whole | None) -> tuple[Small, Small, NDArray[np.uint64]]:
    """Return the kinds, maps and words of some pages."""
    flags, maps, held = _nonzero(new)
    kinds = np.where(held, np.uint8(_PLAIN), np.uint8(_ZERO))
    if old is None:
        return kinds, maps[kinds != _ZERO], new[flags]
    words = new ^ old
    changed, changed_maps, differ = _nonzero(words)
    # The words of an XOR look random, unlike those of a page, so the XOR is smaller only if it has
    # far fewer words. Text that replaces other text would become almost three times as large.
    kinds[(2 * differ <= held) & (held > 0)] = _XOR
    plain = np.flatnonzero(kinds != _XOR)
    words[plain], changed[plain], changed_maps[plain] = new[plain], flags[plain], maps[plain]
    return kinds, changed_maps[kinds != _ZERO], words[changed]


def decode(data: bytes, previous: Previous, *, pages: int) -> tuple[Numbers, Whole]:
    """Return the page numbers and pages of a batch. `pages`: number of pages in the file.

    Needs no more memory than for `MOST_PAGES` pages. `previous` is called for at most a few hundred
    pages at a time, and only for pages that were encoded as a difference. Raises Damaged.
    """
    most = _COUNT.size + MOST_PAGES * (_PER_PAGE + _MAP + PAGE)
    told = memoryview(_decompressed(data, most, zstandard.ZstdDecompressor()))
    if len(told) < _COUNT.size:
        raise damaged("truncated pages")
    (count,) = _COUNT.unpack_from(told)
    at = _COUNT.size + count * _PER_PAGE
    if count > MOST_PAGES or len(told) < at:
        raise damaged(f"a batch with an invalid count of {count} pages in {len(told)} bytes")
    left_out = np.frombuffer(told, "<u4", count, _COUNT.size)
    kinds = np.frombuffer(told, np.uint8, count, _COUNT.size + 4 * count)
    numbers = np.cumsum(left_out.astype(np.intp) + 1) - 1
    if count and (numbers[-1] >= pages or kinds.max() > _XOR):
        raise damaged(
            f"pages of an unknown kind, or page {numbers[-1]} of a file with {pages} pages"
        )
    mapped = np.flatnonzero(kinds)
    words_at = at + len(mapped) * _MAP
    if len(told) < words_at:
        raise damaged("pages with truncated maps")
    maps = np.zeros((count, _MAP), dtype=np.uint8)
    maps[mapped] = np.frombuffer(told, np.uint8, words_at - at, at).reshape(-1, _MAP)
    ends = np.cumsum(_counts(maps))
    if len(told) - words_at != 8 * (ends[-1] if count else 0):
        raise damaged("pages whose maps do not match their words")
    words = np.frombuffer(told, "<u8", offset=words_at)
    found = np.zeros((count, _WORDS), dtype=np.uint64)
    done = 0
    for first in range(0, count, _STRETCH):
        some = slice(first, first + _STRETCH)
        end = int(ends[some][-1])
        _unpack(found[some], maps[some], words[done:end])
        xored = np.flatnonzero(kinds[some] == _XOR) + first
        if len(xored):
            found[xored] ^= previous(numbers[xored])
        done = end
    return numbers, found


def _unpack(into: Whole, maps: Small, words: NDArray[np.uint64]) -> None:
    into[np.unpackbits(maps, axis=1, bitorder="little").view(np.bool_)] = words


def _nonzero(words: Whole) -> tuple[NDArray[np.bool_], Small, NDArray[np.intp]]:
    """Return which words are nonzero, as flags and as maps, and their number in each page."""
    flags = words != 0
    maps = np.packbits(flags, axis=1, bitorder="little")
    return flags, maps, _counts(maps)


def _counts(maps: Small) -> NDArray[np.intp]:
    counts: NDArray[np.intp] = np.bitwise_count(maps.view(np.uint64)).sum(axis=1, dtype=np.intp)
    return counts


def encode_state(state: bytes, previous: bytes | None) -> bytes:
    """Encode a device state as a difference from `previous`, the other end's state; None: the other
    end has no state. Raises ValueError for a state above `MOST_STATE`.
    """
    if len(state) > MOST_STATE:
        raise ValueError(f"a device state has {len(state)} bytes; the maximum is {MOST_STATE}")
    # With its standard settings, zstd finds few matches in a previous state above 1 MiB: it
    # remembers 64 Ki positions and forgets distant ones. With these settings, it finds almost all
    # matches, in less time.
    bits = max(len(state), len(previous or b"")).bit_length()
    settings = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_DFAST,
        window_log=min(max(bits + 1, 18), 30),
        hash_log=min(max(bits - 3, 14), 24),
        chain_log=min(max(bits - 3, 14), 24),
        search_log=1,
        min_match=5,
    )
    packer = zstandard.ZstdCompressor(compression_params=settings, dict_data=_dictionary(previous))
    return _name(previous) + packer.compress(state)


def decode_state(data: bytes, previous: bytes | None) -> bytes:
    """Decode a device state. `previous`: the state against which it may have been encoded.

    Raises Damaged, also if it was encoded against a different state.
    """
    if data[:DIGEST] == _NOTHING:
        previous = None
    if data[:DIGEST] != _name(previous):
        raise damaged("a device state that does not follow the last device state")
    unpacker = zstandard.ZstdDecompressor(dict_data=_dictionary(previous))
    return _decompressed(data[DIGEST:], MOST_STATE, unpacker)


def _name(previous: bytes | None) -> bytes:
    return digest(previous) if previous else _NOTHING


def _dictionary(previous: bytes | None) -> zstandard.ZstdCompressionDict | None:
    if not previous:
        return None
    return zstandard.ZstdCompressionDict(previous, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _decompressed(data: bytes, most: int, unpacker: zstandard.ZstdDecompressor) -> bytes:
    try:
        # The frame states its size, so at most the maximum is allocated.
        if not 0 <= zstandard.frame_content_size(data) <= most:
            raise damaged(f"compressed data of more than {most} bytes, or of unknown size")
        return unpacker.decompress(data, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise damaged("data that cannot be decompressed") from exc


def digests(pages: Whole) -> NDArray[np.uint64]:
    """Return a digest of each page, shape (n,): the first 8 bytes of its BLAKE3, little endian.

    Two different pages have the same digest with a probability of 2**-64, so no collision is
    expected in 2**40 comparisons. A guest that creates a collision on purpose harms only its own
    memory.
    """
    found = np.full(len(pages), ZERO_DIGEST, dtype=np.uint64)
    for at in np.flatnonzero(pages.any(axis=1)).tolist():
        found[at] = _short(pages[at].tobytes())
    return found


def _short(page: bytes) -> int:
    return int.from_bytes(blake3(page).digest(8), "little")


ZERO_DIGEST = _short(bytes(PAGE))
"""The digest of a page of zeros; see `digests`."""
