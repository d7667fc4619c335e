"""Reads a snapshot's chunks from several stores: the near one, and others for what it has lost."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vmckpt.errors import BadInput, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.repository import Store, opened


class TieredReader(Reader):
    """As a reader of the first store; what that has not whole, the next one is asked for.

    A chunk is what its digest says, whichever store it comes from.
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
        """A chunk. Raises StoreError if no store has it whole: what the first one said."""
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
        """See Reader.expect. A store that does not answer is asked again by `read`."""
        try:
            super().expect(digests)
        except StoreError:
            for one in self._others[:1]:
                one.expect(digests)


def others(places: Sequence[StorePlace], cache: Path | None) -> Iterator[Store]:
    """The stores that are asked for what another one has lost, without those that are away."""
    for place in places:
        try:
            yield opened(place, cache=cache)
        except (StoreError, BadInput):
            continue


def warnings(reader: TieredReader, store: Store) -> list[str]:
    """What is to be said of a reading that needed other stores."""
    if not reader.borrowed:
        return []
    return [
        f"{reader.borrowed} chunks came from another store, as {store.backend.where} has lost them;"
        " vmckpt snapshot verify --repair brings them back"
    ]
