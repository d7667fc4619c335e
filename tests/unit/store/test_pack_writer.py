"""Chunks are written once, into packs, and an error reaches whoever writes."""

import os
from pathlib import Path

import pytest

from tests.support.storing import (
    SEALING,
    assert_no_garbage,
    assert_whole,
    chunk,
    chunks,
    gc,
    new_store,
    read,
    write,
)
from vmckpt.errors import StoreError
from vmckpt.store.backend.base import Data
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format.sealing import Encrypted, Plain
from vmckpt.store.pack_writer import Packing
from vmckpt.units import Bytes


def test_a_chunk_is_stored_once(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    first = write(store, "one", chunks(1, 2, 1, 1, 3))
    second = write(store, "two", chunks(3, 2, 4))

    assert (first.chunks_new, first.chunks_known) == (3, 2)
    assert (second.chunks_new, second.chunks_known) == (1, 2)
    assert 4096 < second.bytes_new < 4200
    assert read(store, "two") == chunks(3, 2, 4)


def test_a_chunk_in_a_condemned_pack_is_stored_anew(tmp_path: Path) -> None:
    """A collection goes by it that this writer knows: it does not wait for the writer."""
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(*range(8)))
    store.delete("one")
    assert gc(store).condemned > 0
    again = write(store, "two", chunks(*range(8)))

    assert (again.chunks_new, again.chunks_known) == (8, 0)
    assert gc(store).removed > 0
    assert_whole(store)


def test_another_domain_shares_nothing(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1, 2))

    for sealing in (Encrypted(b"x" * 32), Plain()):
        with store.writer(sealing) as writer:
            coming = [writer.add(one) for one in chunks(1, 2)]
            assert writer.finish().chunks_new == 2
            assert [writer.has(one.result()) for one in coming] == [True, True]


def test_chunks_of_any_size_and_many_packs(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    plain = [chunk(n, size) for n, size in enumerate([1, 2, 4095, 65536, 1 << 20, 4 << 20, 7] * 3)]
    with store.writer(SEALING, parallel=2) as writer:
        coming = [writer.add(memoryview(one)) for one in plain]
        writer.finish()
        digests = [one.result() for one in coming]

    with store.reader(SEALING, cache=Bytes(1 << 20)) as reader:
        assert list(reader.read_many(digests)) == plain
        assert [reader.read(one) for one in reversed(digests)] == plain[::-1]


def test_a_writer_that_fails_leaves_nothing_that_is_published(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with pytest.raises(ValueError, match="too many for one chunk"), store.writer(SEALING) as writer:
        writer.add(bytes(5 << 20)).result()

    assert store.manifests() == []
    assert list(store.backend.keys("locks/")) == []
    assert_no_garbage(store)


def test_an_error_in_a_thread_reaches_who_adds_and_who_finishes(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with store.writer(SEALING) as writer:
        failed = writer.add(bytes(5 << 20))
        with pytest.raises(ValueError, match="too many for one chunk"):
            failed.result()
        with pytest.raises(ValueError, match="too many for one chunk"):
            writer.add(chunk(1))
        with pytest.raises(ValueError, match="too many for one chunk"):
            writer.finish()


class FullFolder(LocalFolder):
    """A folder in which there is no room for a pack."""

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        if key.startswith("packs/"):
            raise StoreError("no space left on device")
        return super().put(key, data, replace=replace)


def test_packs_that_all_fail_end_in_errors_and_block_nothing(tmp_path: Path) -> None:
    new_store(tmp_path / "s")
    packing = Packing(FullFolder(tmp_path / "s"), lambda _info, _rows: None, size=70_000)
    failed = 0
    for number in range(20):
        try:
            packing.add(bytes([number]) * 32, os.urandom(60_000), 60_000)
        except StoreError:
            failed += 1
    assert failed > 3
    packing.close()
