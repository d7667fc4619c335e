"""Takes in boxes that another store, or a file, has: sealed, and mostly nobody here can open them.

What is not encrypted is compared with its name. What is goes into foreign packs (see
`format.pack`): the snapshots it came with can be read from there, but no writer and no other copy
counts on it, unless the other one has the very same box. So a wrong box under
a right name harms no snapshots but those that came with it.
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
    """What a store has, as far as one may count on it who cannot open it."""

    own: Index
    foreign: Index

    @classmethod
    def of(cls, index: Index) -> "Present":
        """From all packs that count."""
        return cls(index.only(foreign=False), index.only(foreign=True))

    def missing(self, names: Names) -> Names:
        """Chunks that none of the store's own packs has."""
        return names[~self.own.has(names)]

    def same(self, name: bytes, told: bytes) -> bool:
        """Whether it has a chunk in a box of this hash."""
        return any(one.hash == told for one in self.foreign.places(name))


class Receiver:
    """One who adds boxes to a store; a context manager, for one thread.

    Nothing it has told to be there goes away before it ends, nor later if a manifest names it that
    was published by then.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, *, encrypted: bool, pack_size: int = PACK_SIZE,
        beat: Seconds = BEAT,
    ) -> None:  # fmt: skip
        """`encrypted`: nobody here can see whether a box is what its name says."""
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
        """Take a box. Raises StoreDamaged, naming the chunk, if it is seen to be a wrong one, and
        StoreError."""
        if self._plain is not None and len(self._plain.unseal(box, name)) != plain:
            raise damaged(name, "it is not as long as it is told to be")
        self._packing.add(name, box, plain)
        self._added += 1
        self._bytes_new += len(box)

    def finish(self) -> Written:
        """Wait until all is durable. Raises StoreError if anything failed."""
        self._packing.finish()
        fault("writer: finished")
        self.finished = True
        return Written(bytes_new=Bytes(self._bytes_new), chunks_new=self._added, chunks_known=0)

    def _close(self) -> None:
        self._packing.close()
        self.present = Present(Index(), Index())
        # A lock that stays behind dies of age.
        with suppress(StoreError):
            self.lock.release()


def _nobody(_info: PackInfo, _rows: pack.Rows) -> None:
    """Who takes boxes in looks at none of them again."""
