"""Write chunks to a store: seal new chunks in threads and collect them in packs.

Chunks that the store already contains are skipped. One pack is filled while others are being
written to the store.
"""

import os
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from blake3 import blake3

from vmckpt.errors import StoreError
from vmckpt.store import pending_deletion
from vmckpt.store.backend.base import Backend
from vmckpt.store.catalog import Catalog
from vmckpt.store.chunk_index import Index, PackInfo
from vmckpt.store.fault_injection import fault
from vmckpt.store.format import pack as format_pack
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.locks import BEAT, Lock, LockPurpose
from vmckpt.units import Bytes, Seconds

PACK_SIZE = 32 << 20
_FIRST = 1 << 20
"""Initial size of a buffer, in bytes. Clearing a full-size buffer would take longer than writing a
small snapshot."""
_MOST_ROWS = 1 << 16
_ROW = struct.Struct(f"<{format_pack.NAME}sIII{format_pack.HASH}s")
# One buffer is filled while two are being written: one is being copied to the kernel, the other is
# being synced.
_BUFFERS = 3
_SENDING = 2


@dataclass(slots=True)
class _Open:
    """A pack that is being filled."""

    buffer: bytearray
    end: int
    rows: bytearray = field(default_factory=bytearray)
    """The index rows, in encoded form: tuples would take five times the memory."""


Done = Callable[[PackInfo, format_pack.Rows], None]


class Packing:
    """Collects sealed chunks in packs, and writes the packs to a store in threads.

    Safe to use from several threads. If a write fails, a later call of `add` or `finish` raises its
    error. After that, only call `close`.
    """

    def __init__(
        self, backend: Backend, done: Done, *, generation: int = 0, size: int = PACK_SIZE,
        foreign: bool = False,
    ) -> None:  # fmt: skip
        """Write packs to `backend`. `done` is called for each pack, once the pack is durable.

        `size` is the size of a pack in bytes. For `generation` and `foreign` see `format.pack`.
        """
        self._foreign = foreign
        self._backend, self._told, self._generation, self._size = backend, done, generation, size
        self._open: _Open | None = None
        self._guard = threading.Lock()
        self._free: queue.LifoQueue[bytearray | None] = queue.LifoQueue()
        # The most recently returned buffer is reused first, so no unneeded buffer is allocated.
        for _ in range(_BUFFERS):
            self._free.put(None)
        self._pool = ThreadPoolExecutor(_SENDING, "pack")
        self._sent: list[Future[None]] = []

    def add(self, name: bytes, box: bytes | memoryview, plain: int) -> None:
        """Add a sealed chunk to the open pack. `plain` is the chunk's length before sealing.

        Raises StoreError if writing an earlier pack failed, and BadInput for an invalid chunk.
        """
        format_pack.checked_box(name, box, plain)
        told = format_pack.box_hash(box)
        with self._guard:
            pack = self._open
            if pack is not None and (
                pack.end + len(box) > self._size or len(pack.rows) >= _MOST_ROWS * _ROW.size
            ):
                self._send()
                pack = None
            if pack is None:
                pack = self._open = self._begin()
            end = pack.end + len(box)
            if end > len(pack.buffer):
                wanted = max(end, min(2 * len(pack.buffer), self._size))
                pack.buffer.extend(bytes(wanted - len(pack.buffer)))
            pack.buffer[pack.end : end] = box
            pack.rows += _ROW.pack(name, pack.end, len(box), plain, told)
            pack.end = end

    def finish(self) -> None:
        """Write the open pack; all packs are durable on return. Raises StoreError."""
        with self._guard:
            if self._open is not None:
                self._send()
            self._wait(0)
            # Free the buffers, because encoding the manifest of a large guest needs the memory.
            for _ in [self._free.get() for _ in range(_BUFFERS)]:
                self._free.put(None)

    def close(self) -> None:
        """Discard the open pack and all queued packs, and wait for packs that are being written."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open, self._free = None, queue.LifoQueue()

    def _begin(self) -> _Open:
        # May raise, so it comes first: a buffer that is never returned would block a later call.
        self._wait(_BUFFERS)
        buffer = self._free.get()
        if buffer is None:
            buffer = bytearray(min(self._size, _FIRST))
        head = format_pack.header(os.urandom(16), foreign=self._foreign)
        buffer[: len(head)] = head
        return _Open(buffer, len(head))

    def _send(self) -> None:
        pack, self._open = self._open, None
        if pack is not None:
            self._sent.append(self._pool.submit(self._put, pack))

    def _put(self, pack: _Open) -> None:
        try:
            rows = np.frombuffer(pack.rows, dtype=format_pack.ROW)
            tail = format_pack.tail(rows, self._generation, foreign=self._foreign)
            end = pack.end + len(tail)
            # Assigning to a slice extends the bytearray if needed.
            pack.buffer[pack.end : end] = tail
            with memoryview(pack.buffer)[:end] as data:
                info = PackInfo(blake3(data).hexdigest(), self._generation, end, self._foreign)
                self._backend.put(format_pack.key_of(info.id), data)
            fault("pack: put")
            self._told(info, rows)
        finally:
            self._free.put(pack.buffer)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` packs are being written. Raises StoreError if a write fails."""
        while self._sent and (len(self._sent) > most or self._sent[0].done()):
            self._sent.pop(0).result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a writer added to the store."""

    bytes_new: Bytes
    """Size of the added sealed chunks, in bytes. Excludes chunks that the store already had."""
    chunks_new: int
    chunks_known: int


class Writer:
    """Adds chunks to a store. Use it as a context manager. Safe to use from several threads.

    Chunks that the writer reported as present are kept until the writer is closed. After that, they
    are kept if a manifest published before the close needs them.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, sealing: Sealing, *,
        parallel: int = 2, pack_size: int = PACK_SIZE, beat: Seconds = BEAT,
    ) -> None:  # fmt: skip
        self.lock = Lock(backend, LockPurpose.WRITE, beat=beat)
        self._backend, self._catalog, self._sealing = backend, catalog, sealing
        self._index = Index()
        self._packing = Packing(backend, self._arrived, size=pack_size)
        self._pool = ThreadPoolExecutor(parallel, "seal")
        # At most this many chunks are waiting or being sealed: enough to keep all threads busy.
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
            without = pending_deletion.known_to(self.lock, self._backend)
            # Chunks in foreign packs have not been verified: see `format.pack`.
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
        """Store a chunk, unless the store already contains the chunk.

        Returns a future for the digest. The bytes must not change before the future is done. If an
        earlier chunk failed, raises its error.
        """
        self._room.acquire()
        try:
            self._check()
            return self._pool.submit(self._sealed, plain)
        except BaseException:
            self._room.release()
            raise

    def has(self, digest: bytes) -> bool:
        """Return whether a chunk is stored or being stored, and will be kept for this writer."""
        name = self._sealing.name_of(digest)
        with self._guard:
            return name in self._under_way or bool(self._index.places(name))

    def finish(self) -> Written:
        """Wait until all chunks are durable. If a chunk or pack failed, raises its error."""
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
        """Seal and store one chunk, in a thread of the pool. Returns the chunk's digest."""
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
        """Return whether a chunk is known. If it is unknown, register it as being stored."""
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

    def _arrived(self, info: PackInfo, rows: format_pack.Rows) -> None:
        """Add the chunks of a pack to the index, after the pack was written."""
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
        # A lock that could not be released expires.
        with suppress(StoreError):
            self.lock.release()
