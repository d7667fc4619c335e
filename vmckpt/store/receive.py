"""Receive sealed chunks from another store or a file, usually without the key to open them.

Unencrypted chunks are compared with their names. Encrypted chunks are stored in foreign packs (see
`format.pack`). Snapshots that arrived together with these chunks are read from the foreign packs.
Writers never rely on foreign packs. A later copy relies on a foreign pack only if that pack has the
identical sealed chunk. So a sealed chunk with the wrong content under a valid name affects only the
snapshots that it arrived with.
"""

from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from vmckpt.errors import StoreError
from vmckpt.store import pending_deletion
from vmckpt.store.backend.base import Backend
from vmckpt.store.catalog import Catalog
from vmckpt.store.chunk_index import Index, Names, PackInfo
from vmckpt.store.fault_injection import fault
from vmckpt.store.format import pack
from vmckpt.store.format.sealing import Plain, damaged
from vmckpt.store.locks import BEAT, Lock, LockPurpose
from vmckpt.store.pack_writer import PACK_SIZE, Packing, Written
from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Present:
    """The chunks in a store on which a receiver without a key may rely."""

    own: Index
    foreign: Index

    @classmethod
    def of(cls, index: Index) -> "Present":
        """Split an index of usable packs into the store's own packs and foreign packs."""
        return cls(index.only(foreign=False), index.only(foreign=True))

    def missing(self, names: Names) -> Names:
        """Return the names of the chunks that none of the store's own packs contains."""
        return names[~self.own.has(names)]

    def same(self, name: bytes, told: bytes) -> bool:
        """Return whether a foreign pack contains a sealed chunk with this name and this hash.

        `told`: the hash of the sealed chunk, from `format.pack.box_hash`.
        """
        return any(one.hash == told for one in self.foreign.places(name))


class Receiver:
    """Adds sealed chunks to a store. Use it as a context manager, in one thread only.

    Chunks that the receiver reported as present are kept until the receiver is closed. After that,
    they are kept if a manifest published before the close needs them.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, *, encrypted: bool, pack_size: int = PACK_SIZE,
        beat: Seconds = BEAT,
    ) -> None:  # fmt: skip
        """`encrypted`: whether the chunks are encrypted and so cannot be compared with their names.

        `beat`: the interval, in seconds, at which the lock is refreshed.
        """
        self.lock = Lock(backend, LockPurpose.WRITE, beat=beat)
        self.finished = False
        self.present = Present(Index(), Index())
        self._backend, self._catalog = backend, catalog
        self._plain = None if encrypted else Plain()
        self._packing = Packing(backend, _nobody, size=pack_size, foreign=encrypted)
        self._added = self._bytes_new = 0

    def __enter__(self) -> Self:
        self.lock.take()
        try:
            without = pending_deletion.known_to(self.lock, self._backend)
            self.present = Present.of(self._catalog.load(without).index)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._close()

    def add(self, name: bytes, box: bytes | memoryview, plain: int) -> None:
        """Add a sealed chunk. `plain` is the chunk's length before sealing.

        Raises StoreDamaged, with the chunk's name, if an unencrypted chunk does not match its name;
        BadInput if its sizes are invalid; StoreError.
        """
        if self._plain is not None and len(self._plain.unseal(box, name)) != plain:
            raise damaged(name, "its length does not match its index row")
        self._packing.add(name, box, plain)
        self._added += 1
        self._bytes_new += len(box)

    def finish(self) -> Written:
        """Wait until all chunks are durable. Raises StoreError if a write failed."""
        self._packing.finish()
        fault("writer: finished")
        self.finished = True
        return Written(bytes_new=Bytes(self._bytes_new), chunks_new=self._added, chunks_known=0)

    def _close(self) -> None:
        self._packing.close()
        self.present = Present(Index(), Index())
        # A lock that could not be released expires.
        with suppress(StoreError):
            self.lock.release()


def _nobody(_info: PackInfo, _rows: pack.Rows) -> None:
    """Ignore a finished pack, because a receiver does not look up the chunks that it wrote."""
