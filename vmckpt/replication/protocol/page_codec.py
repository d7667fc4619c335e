"""Pages and device state as they travel: what differs from what the other end has. Pure.

Of a page only the words that are not zero are sent, and a map of where they are: of the page as it
is, or of the page XOR the one before. A batch is one zstd frame. In it, little endian: their count,
u32; for each page how many numbers are left out before it, u32; for each its kind, u8; for each
that is not all zeros its map, 64 bytes; all the words.
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
"""Whole pages: shape (n, 512)."""
Small: TypeAlias = NDArray[np.uint8]
Previous: TypeAlias = Callable[[Numbers], Whole]
"""The pages of these numbers, as they were before."""

MOST_PAGES = 8000
"""Pages of the largest batch: it fits into one message, whatever they hold."""
MOST_STATE = 256 << 20
"""Bytes of the largest device state."""

_WORDS = PAGE // 8
_MAP = _WORDS // 8
_ZERO, _PLAIN, _XOR = range(3)
_COUNT = struct.Struct("<I")
_PER_PAGE = 4 + 1
# Pages looked at together: 1 MiB, for which no fresh memory has to be mapped each time.
_STRETCH = 256
_NOTHING = bytes(DIGEST)


def encode(numbers: Numbers, new: Whole, old: Whole | None, *, level: int = 1) -> bytes:
    """Pack pages whose numbers rise. `old`: what the other end has of them; None: not known.

    Raises ValueError for more than `MOST_PAGES`, numbers that do not rise, and other shapes.
    """
    left_out = np.diff(numbers, prepend=-1) - 1
    if len(numbers) > MOST_PAGES or new.shape != (len(numbers), _WORDS):
        raise ValueError(f"{len(numbers)} numbers for {new.shape}; at most {MOST_PAGES} pages")
    if old is not None and old.shape != new.shape:
        raise ValueError(f"{old.shape} before {new.shape}")
    if len(numbers) and not 0 <= left_out.min() <= left_out.max() < 1 << 32:
        raise ValueError("the numbers do not rise, or not by so little")
    packed = [
        _pack(new[first : first + _STRETCH], None if old is None else old[first : first + _STRETCH])
        for first in range(0, len(numbers), _STRETCH)
    ]
    # Arrays are buffers, but numpy's types say so only to newer Pythons.
    told: list[Any] = [_COUNT.pack(len(numbers)), left_out.astype("<u4")]
    told += [piece for pieces in zip(*packed, strict=True) for piece in pieces]
    return zstandard.ZstdCompressor(level=level).compress(b"".join(told))


def _pack(new: Whole, old: Whole | None) -> tuple[Small, Small, NDArray[np.uint64]]:
    """The kinds, maps and words of some pages."""
    flags, maps, held = _nonzero(new)
    kinds = np.where(held, np.uint8(_PLAIN), np.uint8(_ZERO))
    if old is None:
        return kinds, maps[kinds != _ZERO], new[flags]
    words = new ^ old
    changed, changed_maps, differ = _nonzero(words)
    # The words of an XOR look random, those of a page do not: it is smaller only if it has far
    # fewer. Text over other text would become almost three times as large.
    kinds[(2 * differ <= held) & (held > 0)] = _XOR
    plain = np.flatnonzero(kinds != _XOR)
    words[plain], changed[plain], changed_maps[plain] = new[plain], flags[plain], maps[plain]
    return kinds, changed_maps[kinds != _ZERO], words[changed]


def decode(data: bytes, previous: Previous, *, pages: int) -> tuple[Numbers, Whole]:
    """The numbers and the pages of a batch; `pages`: how many there are in all.

    Takes no more memory than `MOST_PAGES` need. `previous` is asked for a few hundred at a time,
    and only for those that were packed against it. Raises Damaged.
    """
    most = _COUNT.size + MOST_PAGES * (_PER_PAGE + _MAP + PAGE)
    told = memoryview(_decompressed(data, most, zstandard.ZstdDecompressor()))
    if len(told) < _COUNT.size:
        raise damaged("pages that are cut off")
    (count,) = _COUNT.unpack_from(told)
    at = _COUNT.size + count * _PER_PAGE
    if count > MOST_PAGES or len(told) < at:
        raise damaged(f"{count} pages in {len(told)} bytes")
    left_out = np.frombuffer(told, "<u4", count, _COUNT.size)
    kinds = np.frombuffer(told, np.uint8, count, _COUNT.size + 4 * count)
    numbers = np.cumsum(left_out.astype(np.intp) + 1) - 1
    if count and (numbers[-1] >= pages or kinds.max() > _XOR):
        raise damaged(f"page {numbers[-1]} of {pages}, or pages of an unknown kind")
    mapped = np.flatnonzero(kinds)
    words_at = at + len(mapped) * _MAP
    if len(told) < words_at:
        raise damaged("pages whose maps are cut off")
    maps = np.zeros((count, _MAP), dtype=np.uint8)
    maps[mapped] = np.frombuffer(told, np.uint8, words_at - at, at).reshape(-1, _MAP)
    ends = np.cumsum(_counts(maps))
    if len(told) - words_at != 8 * (ends[-1] if count else 0):
        raise damaged("pages whose maps do not fit their words")
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
    """Which words are not zero: flags, the pages' maps, and how many there are in each page."""
    flags = words != 0
    maps = np.packbits(flags, axis=1, bitorder="little")
    return flags, maps, _counts(maps)


def _counts(maps: Small) -> NDArray[np.intp]:
    counts: NDArray[np.intp] = np.bitwise_count(maps.view(np.uint64)).sum(axis=1, dtype=np.intp)
    return counts


def encode_state(state: bytes, previous: bytes | None) -> bytes:
    """Pack device state against the one that the other end has, if it has one.

    Raises ValueError above `MOST_STATE`.
    """
    if len(state) > MOST_STATE:
        raise ValueError(f"a device state of {len(state)} bytes, at most {MOST_STATE}")
    # At its levels' settings zstd finds little of a previous state above 1 MiB (it has 64 KiB of
    # places to remember, and forgets what is far away); with these almost all, in less time.
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
    """The device state; `previous` is what we have, against which it may have been packed.

    Raises Damaged, also if it was packed against another one.
    """
    if data[:DIGEST] == _NOTHING:
        previous = None
    if data[:DIGEST] != _name(previous):
        raise damaged("device state that follows another one than the last")
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
        # The frame names its size; memory is taken for no more than is allowed.
        if not 0 <= zstandard.frame_content_size(data) <= most:
            raise damaged(f"what claims to have more than {most} bytes, or does not say")
        return unpacker.decompress(data, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise damaged("what cannot be decompressed") from exc


def digests(pages: Whole) -> NDArray[np.uint64]:
    """A digest of each page, shape (n,): the first 8 bytes of its BLAKE3, little endian.

    Two pages that differ have the same one by chance once in 2**64, so that among 2**40 comparisons
    none is expected. Who writes both pages on purpose harms only what he wrote himself.
    """
    found = np.full(len(pages), _ZERO_DIGEST, dtype=np.uint64)
    for at in np.flatnonzero(pages.any(axis=1)).tolist():
        found[at] = _short(pages[at].tobytes())
    return found


def _short(page: bytes) -> int:
    return int.from_bytes(blake3(page).digest(8), "little")


_ZERO_DIGEST = _short(bytes(PAGE))
