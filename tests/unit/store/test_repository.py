"""A store in a folder: what is put in comes out, once, and errors are one clear line."""

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

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
from vmckpt.errors import BadInput, NotInStore, StoreDamaged, StoreError, StoreFull, StoreNewer
from vmckpt.store import fault_injection, locks
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import manifest
from vmckpt.store.format import pack as format_pack
from vmckpt.store.format.sealing import Encrypted, Plain
from vmckpt.store.gc import collect
from vmckpt.store.locks import LIFE, Lock, LockPurpose
from vmckpt.store.repository import Store
from vmckpt.units import Bytes, Seconds


def test_what_is_written_is_read_again_also_by_others(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    written = write(store, "one", chunks(*range(20)), parallel=2)

    assert (written.chunks_new, written.chunks_known) == (20, 0)
    assert read(Store.open(LocalFolder(tmp_path / "s")), "one") == chunks(*range(20))
    assert store.wraps("one") == b"a key"
    assert [one.id for one in store.manifests()] == ["one"]
    assert_whole(store)


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
    with pytest.raises(ValueError, match="more than a chunk"), store.writer(SEALING) as writer:
        writer.add(bytes(5 << 20)).result()

    assert store.manifests() == []
    assert list(store.backend.keys("locks/")) == []
    assert_no_garbage(store)


def test_an_error_in_a_thread_reaches_who_adds_and_who_finishes(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with store.writer(SEALING) as writer:
        failed = writer.add(bytes(5 << 20))
        with pytest.raises(ValueError, match="more than a chunk"):
            failed.result()
        with pytest.raises(ValueError, match="more than a chunk"):
            writer.add(chunk(1))
        with pytest.raises(ValueError, match="more than a chunk"):
            writer.finish()


def test_sealed_boxes_go_from_store_to_store_without_a_key(tmp_path: Path) -> None:
    from vmckpt.store.gc import boxes_of  # noqa: PLC0415

    near, far = new_store(tmp_path / "near"), new_store(tmp_path / "far")
    write(near, "one", chunks(*range(9)))
    with far.receiver(encrypted=True) as writer:
        for pack in near.catalog.load().stored:
            for name, box, plain in boxes_of(near.backend, pack):
                writer.add(name, box, plain)
        writer.finish()
        far.publish("one", near.manifest("one"), near.wraps("one"), writer=writer)

    assert read(far, "one") == chunks(*range(9))
    assert_whole(far)


def test_the_client_keeps_what_packs_hold(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s", tmp_path / "cache")
    for number in range(12):
        write(store, f"s{number}", chunks(*range(number * 5, number * 5 + 9)))

    class Counting(LocalFolder):
        asked: list[str] = []  # noqa: RUF012

        def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            self.asked.append(key)
            return super().get(key, offset, length)

    again = Store.open(Counting(tmp_path / "s"), cache=tmp_path / "cache")
    again.catalog.load()
    Counting.asked.clear()
    assert len(again.catalog.load().index.packs()) == len(list(store.backend.keys("packs/")))
    assert Counting.asked == []

    # A cache that was damaged is made anew.
    for path in (tmp_path / "cache" / store.id).glob("*.index"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    for number in range(12):
        assert read(again, f"s{number}") == chunks(*range(number * 5, number * 5 + 9))
    assert Counting.asked != []


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


def test_a_published_id_is_never_written_over(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", chunks(1))
    write(store, "one", chunks(1), wraps=b"other")  # the same again, as after a lost answer
    with pytest.raises(BadInput, match="another snapshot one"):
        write(store, "one", chunks(2), wraps=b"other")
    assert read(store, "one") == chunks(1)
    assert store.wraps("one") == b"a key"


@pytest.mark.parametrize("id_", ["", "../x", "a/b", ".x", "x" * 101, "a\n"])
def test_an_id_is_one_word(tmp_path: Path, id_: str) -> None:
    with pytest.raises(BadInput, match="is no snapshot's id"):
        new_store(tmp_path / "s").manifest(id_)


def test_nothing_is_published_that_is_not_finished(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with store.writer(SEALING) as writer, pytest.raises(ValueError, match="after its chunks"):
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
            with pytest.raises(StoreError, match="taken for dead"):
                store.publish("one", manifest_of([digest]), b"a key", writer=writer)
        finally:
            fault_injection.listen(None)
    assert store.manifests() == []


def test_a_store_is_made_once_and_opened_only_if_it_is_one(tmp_path: Path) -> None:
    new_store(tmp_path / "s")
    with pytest.raises(BadInput, match="is a store already"):
        new_store(tmp_path / "s")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotInStore, match=r"empty is no store; make one"):
        Store.open(LocalFolder(tmp_path / "empty"))
    with pytest.raises(StoreError, match="no such folder; mount it, or make a store"):
        Store.open(LocalFolder(tmp_path / "away"))
    with pytest.raises(StoreError, match="there is no folder"):
        new_store(tmp_path / "deep" / "deeper")


def test_a_newer_store_is_refused_by_name(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    newer = {"version": 2, "id": store.id}
    store.backend.put("format", manifest.written("format", newer), replace=True)
    with pytest.raises(StoreNewer, match="is a store of version 2; this vmckpt knows 1"):
        Store.open(store.backend)


def test_a_newer_pack_is_refused_by_name_and_never_removed(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    data = bytearray(format_pack.encode([(b"n" * 32, b"box", 3)], bytes(16)))
    data[8] = data[-16] = 3  # its version, at both ends
    newer = blake3(data).hexdigest()
    store.backend.put(format_pack.key_of(newer), bytes(data))

    assert "version 3; this vmckpt knows 2" in str(store.catalog.load().unreadable[newer])
    assert gc(store).unreadable == (newer,)
    assert any(store.backend.keys(format_pack.key_of(newer)))


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

    with pytest.raises(StoreDamaged, match=r"chunk \w{16} is in none of its packs"):
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


def test_a_read_only_store_can_be_read_and_says_what_it_is(tmp_path: Path) -> None:
    write(new_store(tmp_path / "s"), "one", chunks(1, 2))

    with mounted(tmp_path / "m", "none", "bind", tmp_path / "s"):
        store = Store.open(LocalFolder(tmp_path / "m"))
        assert_whole(store)
        assert collect(store, references, dry_run=True).removed == 0
        with pytest.raises(StoreError, match=r"locks/write-.*: it is read-only; see"):
            write(store, "two", chunks(3))
        with pytest.raises(StoreError, match="it is read-only"):
            store.delete("one")


@contextmanager
def mounted(at: Path, kind: str, options: str, source: Path | None) -> Iterator[None]:
    at.mkdir()
    if source is None:
        subprocess.run(["mount", "-t", kind, "-o", options, kind, at], check=True)
    else:
        subprocess.run(["mount", "--bind", source, at], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def test_a_full_disk_is_told_and_leaves_the_store_whole(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "tmpfs", "size=1m", None):
        store = new_store(tmp_path / "m" / "s")
        write(store, "one", chunks(*range(20)))
        with pytest.raises(StoreFull, match=r"no room left to write packs/.*; make room there"):
            write(store, "two", chunks(*range(20, 400)), pack_size=200_000)
        assert list(store.backend.leftovers()) == []
        assert [one.id for one in store.manifests()] == ["one"]
        assert_no_garbage(store)
        assert_whole(store)
        write(store, "three", chunks(*range(20, 60)))
        assert_whole(store)


def test_a_file_that_may_not_grow_is_no_disk_but_told_too(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(StoreError, match=r"packs/.*: (File too large|no room left)"):
            write(store, "one", chunks(1, 2, 3, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(store.backend.leftovers()) == []
    assert_no_garbage(store)


def test_a_place_is_a_folder_or_a_bucket(tmp_path: Path) -> None:
    assert backend_of(tmp_path).where == str(tmp_path)
    assert backend_of("s3://b/p/q?endpoint=http://127.0.0.1:1&region=x").where == "s3://b/p/q"
    for wrong in ("http://b/p", "s3:///p", "s3://b?port=3", "s3://b?x"):
        with pytest.raises(BadInput, match=r"endpoint=https://host:9000|a store is a folder"):
            backend_of(wrong)


def test_small_objects_are_readable_by_people(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    text = (tmp_path / "s" / "format").read_text()
    assert json.loads(text.partition("\nblake3 ")[0])["id"] == store.id
    assert collect(store, references, grace=Seconds(0.0)).removed == 0


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path / "s")
    (tmp_path / "s" / "pins").mkdir()
    told = []

    def fsync(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        told.append(f"sync {path.relative_to(tmp_path / 's').parts[0]}")

    def link(source: str, target: str, **more: Any) -> None:
        told.append(f"link {target}")
        real(source, target, **more)

    real = os.link
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.backend.put("pins/x", b"")
    assert told == ["sync tmp", "link x", "sync pins"]


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
    with pytest.raises(StoreError, match="taken for dead"):
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
