"""Puts chunks into a store: only those that it does not have, sealed in threads."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from vmckpt.errors import StoreError
from vmckpt.store import condemned, packs
from vmckpt.store.backend import Backend
from vmckpt.store.catalog import Catalog
from vmckpt.store.faults import fault
from vmckpt.store.index import Index, PackInfo
from vmckpt.store.locks import BEAT, Lock, Work
from vmckpt.store.packing import PACK_SIZE, Packing
from vmckpt.store.sealing import Sealing
from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a writer did."""

    bytes_new: Bytes
    """Written to the store: sealed, and nothing for what it had."""
    chunks_new: int
    chunks_known: int


class Writer:
    """One who adds to a store; a context manager. May be used from several threads.

    Nothing it has told to be there goes away before it ends, nor later if a manifest names it that
    was published by then.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, sealing: Sealing, *,
        parallel: int = 2, pack_size: int = PACK_SIZE, beat: Seconds = BEAT,
    ) -> None:  # fmt: skip
        self.lock = Lock(backend, Work.WRITE, beat=beat)
        self._backend, self._catalog, self._sealing = backend, catalog, sealing
        self._index = Index()
        self._packing = Packing(backend, self._arrived, size=pack_size)
        self._pool = ThreadPoolExecutor(parallel, "seal")
        # So many chunks wait or are being sealed: enough to keep all threads at work.
        self._places = 4 * parallel + 4
        self._room = threading.Semaphore(self._places)
        self._under_way: set[bytes] = set()
        self._guard = threading.Lock()
        self._failed: BaseException | None = None
        self._bytes_new = self._new = self._known = 0
        self.finished = False

    def __enter__(self) -> Self:
        self.lock.take()
        try:
            without = condemned.known_to(self.lock, self._backend)
            # Nobody has seen what is in foreign packs: see packs.
            self._index = self._catalog.load(without).index.only(foreign=False)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._close()

    def add(self, plain: bytes | memoryview) -> "Future[bytes]":
        """Store a chunk unless it is there; its digest, once it is on its way.

        The bytes must stay as they are until then. Raises StoreError if an earlier one failed.
        """
        self._room.acquire()
        try:
            self._check()
            return self._pool.submit(self._sealed, plain)
        except BaseException:
            self._room.release()
            raise

    def has(self, digest: bytes) -> bool:
        """Whether the store has a chunk, and will keep it for this writer."""
        name = self._sealing.name_of(digest)
        with self._guard:
            return name in self._under_way or bool(self._index.places(name))

    def finish(self) -> Written:
        """Wait until all is durable. Raises StoreError if anything failed."""
        for _ in range(self._places):
            self._room.acquire()
        self._room.release(self._places)
        self._check()
        self._packing.finish()
        fault("writer: finished")
        self.finished = True
        return Written(
            bytes_new=Bytes(self._bytes_new), chunks_new=self._new, chunks_known=self._known
        )

    def _sealed(self, plain: bytes | memoryview) -> bytes:
        """In a thread: everything that one chunk needs; its digest."""
        sealing = self._sealing
        try:
            digest = sealing.digest_of(plain)
            name = sealing.name_of(digest)
            with self._guard:
                known = self._count(name)
            if not known:
                self._take(name, sealing.seal(plain, digest), len(plain))
            return digest
        except BaseException as exc:
            self._failed = self._failed or exc
            raise
        finally:
            self._room.release()

    def _count(self, name: bytes) -> bool:
        """Whether a chunk is there; if not, it is ours to store."""
        if name in self._under_way or self._index.places(name):
            self._known += 1
            return True
        self._under_way.add(name)
        self._new += 1
        return False

    def _take(self, name: bytes, box: bytes, plain: int) -> None:
        try:
            self._packing.add(name, box, plain)
        except BaseException as exc:
            self._failed = self._failed or exc
            raise
        with self._guard:
            self._bytes_new += len(box)

    def _arrived(self, info: PackInfo, rows: packs.Rows) -> None:
        """A pack is in the store."""
        with self._guard:
            self._index.add(info, rows)
            self._under_way.difference_update(rows["name"].tolist())

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._packing.close()
        self._index = Index()
        # A lock that stays behind dies of age.
        with suppress(StoreError):
            self.lock.release()
