"""Reading ahead: each chunk is fetched once, and no more is held than there is room for."""

import threading
import time
from pathlib import Path

from tests.support.storing import SEALING, chunk
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.repository import Store
from vmckpt.units import Bytes

CHUNK = 64 << 10
CACHE = Bytes(2 << 20)


class Counting(LocalFolder):
    """Counts the bytes that are read of packs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read = 0
        self._guard = threading.Lock()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, offset, length)
        with self._guard:
            self.read += len(data) if key.startswith("packs/") else 0
        return data


def filled(folder: Path, count: int) -> tuple[Counting, Store, list[bytes]]:
    """A store of chunks that do not compress, and their digests."""
    store = Store.create(LocalFolder(folder))
    with store.writer(SEALING) as writer:
        coming = [writer.add(chunk(number, CHUNK)) for number in range(count)]
        writer.finish()
    backend = Counting(folder)
    return backend, Store.open(backend), [one.result() for one in coming]


def quiet(backend: Counting) -> int:
    """Bytes that were read, once no more are."""
    seen = -1
    while seen != backend.read:
        seen = backend.read
        time.sleep(0.1)
    return seen


def open_index(reader: Reader, backend: Counting, digest: bytes) -> None:
    """So that only boxes are counted from here on."""
    reader.read(digest)
    backend.read = 0


def test_no_more_is_fetched_than_there_is_room_for(tmp_path: Path) -> None:
    backend, store, digests = filled(tmp_path / "s", 200)
    with store.reader(SEALING, cache=CACHE) as reader:
        open_index(reader, backend, digests[-1])
        reader.expect(digests)
        assert CACHE // 4 < quiet(backend) <= CACHE // 2 + 2 * CHUNK


def test_what_is_expected_is_fetched_once(tmp_path: Path) -> None:
    backend, store, digests = filled(tmp_path / "s", 200)
    with store.reader(SEALING, cache=CACHE) as reader:
        open_index(reader, backend, digests[-1])
        reader.expect(digests[:100])
        reader.expect(digests)  # some of them again
        for number, digest in enumerate(digests):
            assert reader.read(digest) == chunk(number, CHUNK)
        assert quiet(backend) < 1.05 * 200 * CHUNK
