"""Read a snapshot's chunks from one store, or from other stores if the first has lost them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vmckpt.errors import BadInput, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.repository import Store, opened
from vmckpt.units import show_count


class TieredReader(Reader):
    """Reads from the first store. If a chunk is lost or damaged there, reads it from the others.

    Every chunk is compared with its digest, no matter which store it was read from.
    """

    def __init__(self, stores: Sequence[Store], sealing: Sealing) -> None:
        first, *others = stores
        super().__init__(first.backend, first.catalog, sealing)
        self._others = [one.reader(sealing) for one in others]
        self.borrowed = 0
        """Number of chunks that were read from another store."""

    def close(self) -> None:
        """See Reader.close."""
        super().close()
        for one in self._others:
            one.close()

    def read(self, digest: bytes) -> bytes:
        """Return the content of a chunk.

        If no store has an intact copy, raises the first store's StoreError.
        """
        try:
            return super().read(digest)
        except StoreError:
            for one in self._others:
                try:
                    plain = one.read(digest)
                except StoreError:
                    continue
                self.borrowed += 1
                return plain
            raise

    def expect(self, digests: Sequence[bytes]) -> None:
        """See Reader.expect. If the first store fails, reads ahead from the second store."""
        try:
            super().expect(digests)
        except StoreError:
            for one in self._others[:1]:
                one.expect(digests)


def others(places: Sequence[StorePlace], cache: Path | None) -> Iterator[Store]:
    """Open the stores from which lost chunks can be read. Skips stores that cannot be opened.

    `cache`: see `repository.opened`.
    """
    for place in places:
        try:
            yield opened(place, cache=cache)
        except (StoreError, BadInput):
            continue


def warnings(reader: TieredReader, store: Store) -> list[str]:
    """Return a warning if chunks had to be read from other stores."""
    if not reader.borrowed:
        return []
    return [
        f"{show_count(reader.borrowed, 'chunk')} unreadable in {store.backend.where}, but read from"
        " another store; run vmckpt snapshot verify --repair --from STORE to restore the chunks"
    ]
