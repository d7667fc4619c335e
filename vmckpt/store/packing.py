"""Fills packs and sends them off, one while others are on their way into the store."""

import os
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from vmckpt.store import packs
from vmckpt.store.backend import Backend
from vmckpt.store.faults import fault
from vmckpt.store.index import PackInfo

PACK_SIZE = 32 << 20
_FIRST = 1 << 20
"""Bytes of a new buffer: to clear a whole pack's takes longer than to write a small snapshot."""
_MOST_ROWS = 1 << 16
_ROW = struct.Struct(f"<{packs.NAME}sIII{packs.HASH}s")
# One is filled while two are on their way: one is copied to the system, one waits for the disk.
_BUFFERS = 3
_SENDING = 2


@dataclass(slots=True)
class _Open:
    """A pack that is being filled."""

    buffer: bytearray
    end: int
    rows: bytearray = field(default_factory=bytearray)
    """As in its index: tuples would take five times the memory."""


Done = Callable[[PackInfo, packs.Rows], None]


class Packing:
    """May be used from several threads. After an error nothing more is taken."""

    def __init__(
        self, backend: Backend, done: Done, *, generation: int = 0, size: int = PACK_SIZE,
        foreign: bool = False,
    ) -> None:  # fmt: skip
        """`done` is told of each pack that is in the store for good. `foreign`: see `packs`."""
        self._foreign = foreign
        self._backend, self._told, self._generation, self._size = backend, done, generation, size
        self._open: _Open | None = None
        self._guard = threading.Lock()
        self._free: queue.LifoQueue[bytearray | None] = queue.LifoQueue()
        # The last one that came back is taken first: memory is taken for no more than are needed.
        for _ in range(_BUFFERS):
            self._free.put(None)
        self._pool = ThreadPoolExecutor(_SENDING, "pack")
        self._sent: list[Future[None]] = []

    def add(self, name: bytes, box: bytes | memoryview, plain: int) -> None:
        """Put a box into the next pack. Raises StoreError if an earlier pack failed."""
        packs.checked_box(name, box, plain)
        told = packs.box_hash(box)
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
        """Send off what is there; all packs are durable on return. Raises StoreError."""
        with self._guard:
            if self._open is not None:
                self._send()
            self._wait(0)
            # What follows is a manifest, which for a large guest needs the memory.
            for _ in [self._free.get() for _ in range(_BUFFERS)]:
                self._free.put(None)

    def close(self) -> None:
        """Send nothing more; what is on its way arrives."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open, self._free = None, queue.LifoQueue()

    def _begin(self) -> _Open:
        buffer = self._free.get()
        self._wait(_BUFFERS)
        if buffer is None:
            buffer = bytearray(min(self._size, _FIRST))
        head = packs.header(os.urandom(16), foreign=self._foreign)
        buffer[: len(head)] = head
        return _Open(buffer, len(head))

    def _send(self) -> None:
        pack, self._open = self._open, None
        if pack is not None:
            self._sent.append(self._pool.submit(self._put, pack))

    def _put(self, pack: _Open) -> None:
        try:
            rows = np.frombuffer(pack.rows, dtype=packs.ROW)
            tail = packs.tail(rows, self._generation, foreign=self._foreign)
            end = pack.end + len(tail)
            # Longer or not: a slice of a bytearray takes what it is given.
            pack.buffer[pack.end : end] = tail
            with memoryview(pack.buffer)[:end] as data:
                info = PackInfo(blake3(data).hexdigest(), self._generation, end, self._foreign)
                self._backend.put(packs.key_of(info.id), data)
            fault("pack: put")
            self._told(info, rows)
        finally:
            self._free.put(pack.buffer)

    def _wait(self, most: int) -> None:
        """Look at packs that were sent, until no more than so many are on their way."""
        while self._sent and (len(self._sent) > most or self._sent[0].done()):
            self._sent.pop(0).result()
