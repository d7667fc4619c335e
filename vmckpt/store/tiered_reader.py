"""Read a snapshot's chunks from one store, and from other stores those that it has lost."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vmckpt.errors import BadInput, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.repository import Store, opened


class TieredReader(Reader):
    """Reads from the first store; chunks that it has lost or damaged come from the next stores.

    Every chunk is compared with its digest, whichever store it comes from.
    """

    def __init__(self, stores: Sequence[Store], sealing: Sealing) -> None:
        first, *others = stores
        super().__init__(first.backend, first.catalog, sealing)
        self._others = [one.reader(sealing) for one in others]
        self.borrowed = 0
        """Chunks that came from another store."""

    def close(self) -> None:
        """See Reader.close."""
        super().close()
        for one in self._others:
            one.close()

    def read(self, digest: bytes) -> bytes:
        """Return the content of a chunk.

        Raises StoreError, the first store's error, if no store has an intact copy.
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
        """See Reader.expect. If the first store fails, the second one fetches ahead."""
        try:
            super().expect(digests)
        except StoreError:
            for one in self._others[:1]:
                one.expect(digests)


def others(places: Sequence[StorePlace], cache: Path | None) -> Iterator[Store]:
    """Open the stores that replace lost chunks; stores that cannot be opened are left out."""
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
        f"{reader.borrowed} chunks were read from another store, as {store.backend.where} has lost"
        " them; run vmckpt snapshot verify --repair to restore them"
    ]
