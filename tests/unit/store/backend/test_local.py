"""A store in a folder: what is durable when, and a folder that is full or read-only."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import mounted
from tests.support.storing import (
    assert_no_garbage,
    assert_whole,
    chunks,
    new_store,
    references,
    write,
)
from vmckpt.errors import StoreError, StoreFull
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.gc import collect
from vmckpt.store.repository import Store


def test_a_read_only_store_can_be_read_and_says_what_it_is(tmp_path: Path) -> None:
    write(new_store(tmp_path / "s"), "one", chunks(1, 2))

    with mounted(tmp_path / "m", "none", "bind", tmp_path / "s"):
        store = Store.open(LocalFolder(tmp_path / "m"))
        assert_whole(store)
        assert collect(store, references, dry_run=True).removed == 0
        with pytest.raises(StoreError, match=r"locks/write-.*: read-only file system; check"):
            write(store, "two", chunks(3))
        with pytest.raises(StoreError, match="read-only file system"):
            store.delete("one")


def test_a_full_disk_is_told_and_leaves_the_store_whole(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "tmpfs", "size=1m", None):
        store = new_store(tmp_path / "m" / "s")
        write(store, "one", chunks(*range(20)))
        with pytest.raises(
            StoreFull, match=r"cannot write packs/.*: no space left; free some space, or"
        ):
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
        with pytest.raises(StoreError, match=r"packs/.*: (File too large|no space left)"):
            write(store, "one", chunks(1, 2, 3, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(store.backend.leftovers()) == []
    assert_no_garbage(store)


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
