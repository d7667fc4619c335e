"""A store in a folder: what is put in comes out, once, and errors are one clear line."""

import json
from pathlib import Path

import pytest

from tests.support.storing import (
    SEALING,
    assert_no_garbage,
    assert_whole,
    chunk,
    chunks,
    gc,
    manifest_of,
    new_store,
    parsed,
    read,
    references,
    write,
)
from vmckpt.errors import BadInput, NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.store import fault_injection, locks
from vmckpt.store.backend.base import Data
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import manifest
from vmckpt.store.gc import collect
from vmckpt.store.locks import LIFE, Lock, LockPurpose
from vmckpt.store.repository import Store
from vmckpt.units import Seconds


def test_what_is_written_is_read_again_also_by_others(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    written = write(store, "one", chunks(*range(20)), parallel=2)

    assert (written.chunks_new, written.chunks_known) == (20, 0)
    assert read(Store.open(LocalFolder(tmp_path / "s")), "one") == chunks(*range(20))
    assert store.wraps("one") == b"a key"
    assert [one.id for one in store.manifests()] == ["one"]
    assert_whole(store)


def test_a_snapshot_is_deleted_unless_it_is_pinned(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1))
    store.pin("one", "kept for the audit")
    with pytest.raises(BadInput, match="one is pinned"):
        store.delete("one")
    assert store.pins() == {"one"}

    store.unpin("one")
    store.delete("one")
    assert store.manifests() == []
    with pytest.raises(NotInStore, match="no snapshot one"):
        store.delete("one")
    with pytest.raises(NotInStore, match="no snapshot one"):
        store.pin("one")
    assert store.pins() == frozenset()
    assert_no_garbage(store)
    assert list(store.backend.keys("packs/")) == []


class UnpinnedMeanwhile(LocalFolder):
    """A folder where another process removes the first pin right after it was written."""

    removed = False

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        written = super().put(key, data, replace=replace)
        if key.startswith("pins/") and not self.removed:
            self.removed = True
            self.delete(key)
        return written


def test_a_pin_that_another_process_removes_at_once_is_written_again(tmp_path: Path) -> None:
    write(new_store(tmp_path / "s"), "one", chunks(1))
    store = Store.open(UnpinnedMeanwhile(tmp_path / "s"))
    store.pin("one")
    assert store.pins() == {"one"}


def test_a_published_id_is_never_written_over(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1))
    write(store, "one", chunks(1), wraps=b"other")  # the same again, as after a lost answer
    with pytest.raises(BadInput, match="a different snapshot one"):
        write(store, "one", chunks(2), wraps=b"other")
    assert read(store, "one") == chunks(1)
    assert store.wraps("one") == b"a key"


@pytest.mark.parametrize("id_", ["", "../x", "a/b", ".x", "x" * 101, "a\n"])
def test_an_id_is_one_word(tmp_path: Path, id_: str) -> None:
    with pytest.raises(BadInput, match="is not a snapshot ID"):
        new_store(tmp_path / "s").manifest(id_)


def test_nothing_is_published_that_is_not_finished(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with store.writer(SEALING) as writer, pytest.raises(ValueError, match="after all its chunks"):
        store.publish("one", b"", None, writer=writer)


@pytest.mark.parametrize("point", ["publish: wraps", "publish: manifest"])
def test_a_writer_that_is_taken_for_dead_while_it_publishes_has_published_nothing(
    tmp_path: Path, point: str
) -> None:
    """The collection that took it for dead may have removed what its manifest names."""
    store = new_store(tmp_path / "s")
    with store.writer(SEALING) as writer:
        digest = writer.add(chunk(1)).result()
        writer.finish()
        key = writer.lock.key
        fault_injection.listen(
            lambda passed: store.backend.delete(key) if passed == point else None
        )
        try:
            with pytest.raises(StoreError, match="did not refresh the lock"):
                store.publish("one", manifest_of([digest]), b"a key", writer=writer)
        finally:
            fault_injection.listen(None)
    assert store.manifests() == []


def test_a_snapshot_whose_keys_were_removed_and_cannot_be_put_back_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path / "s")

    def full(*_: object) -> None:
        raise StoreError("no space left")

    def collected(passed: str) -> None:
        if passed == "publish: manifest":
            store.backend.delete("wraps/one")
            monkeypatch.setattr(store, "put_wraps", full)

    with store.writer(SEALING) as writer:
        digest = writer.add(chunk(1)).result()
        writer.finish()
        fault_injection.listen(collected)
        try:
            with pytest.raises(StoreError, match="no space left"):
                store.publish("one", manifest_of([digest]), b"a key", writer=writer)
        finally:
            fault_injection.listen(None)
    assert store.manifests() == []


def test_a_store_is_made_once_and_opened_only_if_it_is_one(tmp_path: Path) -> None:
    new_store(tmp_path / "s")
    with pytest.raises(BadInput, match="already contains a store"):
        new_store(tmp_path / "s")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotInStore, match=r"empty is not a store; create one"):
        Store.open(LocalFolder(tmp_path / "empty"))
    with pytest.raises(
        StoreError, match="no such directory; mount the directory, or create a store"
    ):
        Store.open(LocalFolder(tmp_path / "away"))
    with pytest.raises(StoreError, match=r"directory .*deep does not exist; create or mount"):
        new_store(tmp_path / "deep" / "deeper")


def test_a_newer_store_is_refused_by_name(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    newer = {"version": 2, "id": store.id}
    store.backend.put("format", manifest.written("format", newer), replace=True)
    with pytest.raises(
        StoreNewer, match="has store version 2; this vmckpt supports versions up to 1"
    ):
        Store.open(store.backend)


def test_a_manifest_that_cannot_be_read_stops_a_collection(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1))
    path = tmp_path / "s" / "snapshots" / "one"
    path.write_bytes(b"x" + path.read_bytes()[1:])

    with pytest.raises(StoreDamaged, match="snapshots/one: the manifest is damaged"):
        gc(store)
    assert list(store.backend.keys("locks/")) == []


def test_a_missing_pack_is_told_by_who_reads(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1, 2))
    for one in list(store.backend.keys("packs/")):
        store.backend.delete(one.key)

    with pytest.raises(StoreDamaged, match=r"no pack contains chunk \w{16};"):
        read(store, "one")


def test_a_reader_follows_chunks_that_a_collection_moved(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(*range(8)))
    write(store, "two", chunks(0, 4))
    digests, _ = parsed(store.manifest("two"))
    with store.reader(SEALING) as reader:
        reader.read(digests[0])
        store.delete("one")
        assert gc(store).rewritten == 2
        gc(store)
        assert reader.read(digests[1]) == chunk(4)
    assert_no_garbage(store)
    assert_whole(store)


def test_small_objects_are_readable_by_people(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    text = (tmp_path / "s" / "format").read_text()
    assert json.loads(text.partition("\nblake3 ")[0])["id"] == store.id
    assert collect(store, references, grace=Seconds(0.0)).removed == 0


def test_who_slept_for_long_takes_itself_for_dead(tmp_path: Path) -> None:
    """A collection may have found the lock dead, even if nobody has removed it yet."""
    store = Store.create(LocalFolder(tmp_path / "store"))
    times = [0.0]
    lock = Lock(store.backend, LockPurpose.WRITE, beat=Seconds(0.01), clock=lambda: times[0])
    assert lock.take()
    times[0] = LIFE / 2 - 1
    lock.now()
    times[0] = LIFE - 2
    lock.still_ours()
    lock.now()
    times[0] += LIFE / 2 + 1
    with pytest.raises(StoreError, match="did not refresh the lock"):
        lock.still_ours()
    lock.release()


def test_files_of_others_in_a_store_are_passed_over(tmp_path: Path) -> None:
    store = Store.create(LocalFolder(tmp_path / "store"))
    (tmp_path / "store/snapshots/s-old").mkdir(parents=True)
    (tmp_path / "store/snapshots/s-old/s-1").write_bytes(b"x")
    for name in (".nfs0001", ".DS_Store", "a b", "-x", "x" * 101):
        for folder in ("locks", "snapshots", "condemned"):
            (tmp_path / "store" / folder).mkdir(exist_ok=True)
            (tmp_path / "store" / folder / name).write_bytes(b"x")
    assert store.manifests() == []
    assert all(one.work is None for one in locks.list_locks(store.backend))
