"""Read chunks. Expected chunks are read ahead, in large pieces and in threads."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from vmckpt.errors import NotInStore, StoreDamaged, StoreError
from vmckpt.store.backend.base import Backend
from vmckpt.store.catalog import Catalog
from vmckpt.store.chunk_index import Index, Place
from vmckpt.store.format import pack
from vmckpt.store.format.sealing import Sealing
from vmckpt.units import Bytes

CACHE = Bytes(64 << 20)
_PIECE = 4 << 20
"""Maximum total size, in bytes, of the chunks that one read takes from a pack."""
_TAKEN = 64
"""Maximum number of expected chunks that are searched for adjacent chunks at a time."""
_GAP = 64 << 10
"""Largest gap, in bytes, between two chunks that are read in one piece."""


class Reader:
    """Reads chunks from a store. Use it as a context manager. Safe to use from several threads."""

    def __init__(
        self, backend: Backend, catalog: Catalog, sealing: Sealing, *,
        parallel: int = 2, cache: Bytes = CACHE,
    ) -> None:  # fmt: skip
        self._backend, self._catalog, self._sealing = backend, catalog, sealing
        self._index: Index | None = None
        self._pool = ThreadPoolExecutor(parallel, "read")
        self._guard = threading.RLock()
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached, self._most = 0, int(cache)
        self._expected: OrderedDict[bytes, Place] = OrderedDict()
        self._coming: dict[bytes, Future[None]] = {}
        self._ahead: dict[bytes, int] = {}
        """Plain size, by digest, of chunks being fetched ahead, or fetched and not read yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Stop reading ahead, and free the cache."""
        with self._guard:
            self._expected.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cache.clear()
        self._cached = 0

    def read(self, digest: bytes) -> bytes:
        """Return the content of a chunk.

        Raises StoreDamaged if the store has no intact copy of the chunk, and StoreError.
        """
        with self._guard:
            coming = self._coming.get(digest)
        if coming is not None:
            coming.result()
        with self._guard:
            self._ahead.pop(digest, None)
            self._expected.pop(digest, None)
            plain = self._cache.get(digest)
            if plain is not None:
                self._cache.move_to_end(digest)
            self._fetch_ahead()
        return self._found(digest) if plain is None else plain

    def expect(self, digests: Sequence[bytes]) -> None:
        """Announce the chunks that will be read next, in order, so that they can be read ahead.

        Raises StoreError.
        """
        with self._guard:
            index = self._looked(fresh=False)
            for digest in digests:
                if not any(digest in one for one in (self._expected, self._cache, self._coming)):
                    for place in index.places(self._sealing.name_of(digest))[:1]:
                        self._expected[digest] = place
            self._fetch_ahead()

    def read_many(self, digests: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the contents of chunks in order, with read-ahead. Raises the errors of `read`."""
        waiting: deque[bytes] = deque()
        for digest in digests:
            waiting.append(digest)
            if len(waiting) == 2 * _TAKEN:
                self.expect(list(waiting)[-_TAKEN:])
                for _ in range(_TAKEN):
                    yield self.read(waiting.popleft())
        self.expect(list(waiting))
        for digest in waiting:
            yield self.read(digest)

    def _fetch_ahead(self) -> None:
        """Start to fetch expected chunks in threads, if enough of the cache is free."""
        room = self._most // 2 - sum(self._ahead.values())
        if room < self._most // 8:
            return  # later, with more free space, adjacent chunks can be read in one piece
        while self._expected and room > 0:
            taken: list[tuple[bytes, Place]] = []
            while self._expected and room > 0 and len(taken) < _TAKEN:
                taken.append(self._expected.popitem(last=False))
                room -= taken[-1][1].plain
            for piece in _pieces(taken):
                known = self._coming.keys() | self._cache.keys()
                wanted = [one for one in piece if one[0] not in known]
                if not wanted:
                    continue
                job = self._pool.submit(self._fetch, wanted)
                for digest, place in wanted:
                    self._coming[digest] = job
                    self._ahead[digest] = place.plain

    def _fetch(self, piece: Sequence[tuple[bytes, Place]]) -> None:
        """Fetch adjacent chunks, in a thread of the pool. Ignores errors; `read` reports them."""
        left = [digest for digest, _ in piece]
        first, last = piece[0][1], piece[-1][1]
        try:
            length = last.offset + last.length - first.offset
            data = memoryview(self._backend.get(pack.key_of(first.pack), first.offset, length))
            for digest, place in piece:
                start = place.offset - first.offset
                plain = self._sealing.unseal(data[start : start + place.length], digest)
                with self._guard:
                    self._keep(digest, plain)
        except StoreError:
            pass
        finally:
            with self._guard:
                for digest in left:
                    self._coming.pop(digest, None)

    def _keep(self, digest: bytes, plain: bytes) -> None:
        if digest in self._cache:
            return
        self._cache[digest] = plain
        self._cached += len(plain)
        while self._cached > self._most and len(self._cache) > 1:
            old, dropped = self._cache.popitem(last=False)
            self._cached -= len(dropped)
            self._ahead.pop(old, None)

    def _found(self, digest: bytes) -> bytes:
        """Read a chunk that was not read ahead, from any pack that has an intact copy.

        Raises the errors of `read`.
        """
        name = self._sealing.name_of(digest)
        wrong: StoreError | None = None
        for fresh in (False, True):
            # A garbage collection may have moved the chunk since the index was read.
            with self._guard:
                places = self._looked(fresh=fresh).places(name)
            for place in places:
                try:
                    plain = self._box(name, digest, place)
                except (StoreDamaged, NotInStore) as exc:
                    wrong = exc
                    continue
                with self._guard:
                    self._keep(digest, plain)
                return plain
        if isinstance(wrong, StoreDamaged):
            raise wrong
        raise StoreDamaged(
            f"{self._backend.where}: no pack contains chunk {name.hex()[:16]}",
            hint="run vmckpt snapshot verify to see which snapshots use this chunk",
        ) from wrong

    def _box(self, name: bytes, digest: bytes, place: Place) -> bytes:
        key = pack.key_of(place.pack)
        box = self._backend.get(key, place.offset, place.length)
        try:
            return self._sealing.unseal(box, digest)
        except StoreDamaged as exc:
            raise StoreDamaged(
                f"{self._backend.where}: {key}: chunk {name.hex()[:16]} at offset"
                f" {place.offset} is damaged",
                hint="run vmckpt snapshot verify to see which snapshots use this chunk",
            ) from exc

    def _looked(self, *, fresh: bool) -> Index:
        if self._index is None or fresh:
            self._index = self._catalog.load().index
        return self._index


def _pieces(wanted: Sequence[tuple[bytes, Place]]) -> list[list[tuple[bytes, Place]]]:
    """Return the chunks in pieces, each for one read.

    The piece that is needed first comes first.
    """
    order = {digest: number for number, (digest, _) in enumerate(wanted)}
    pieces: list[list[tuple[bytes, Place]]] = []
    size = end = 0
    for digest, place in sorted(wanted, key=lambda one: (one[1].pack, one[1].offset)):
        last = pieces[-1][-1][1] if pieces else None
        if (
            last is None
            or last.pack != place.pack
            or place.offset - end > _GAP
            or size + max(place.length, place.plain) > _PIECE
        ):
            pieces.append([])
            size = 0
        pieces[-1].append((digest, place))
        size += max(place.length, place.plain)
        end = place.offset + place.length
    return sorted(pieces, key=lambda piece: min(order[digest] for digest, _ in piece))
