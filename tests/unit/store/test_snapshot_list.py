"""What snapshots tell of themselves is read once; and which store it is, is looked at."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stocking import Stock, id_of, stocked
from vmckpt.errors import NotInStore, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.snapshot import catalog, prune
from vmckpt.store import repository, snapshot_list
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import manifest
from vmckpt.store.format.metadata import Public
from vmckpt.store.repository import Store


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    stock = stocked(tmp_path, monkeypatch, capsys)
    stock.put("one", range(8))
    stock.put("two", range(8, 16))
    return stock


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes of each manifest were read."""
    told: Counter[str] = Counter()
    get = LocalFolder.get

    def counting(
        self: LocalFolder, key: str, offset: int = 0, length: int | None = None
    ) -> bytes:  # fmt: skip
        data = get(self, key, offset, length)
        if key.startswith("snapshots/"):
            told[key.removeprefix("snapshots/")] += len(data)
        return data

    monkeypatch.setattr(LocalFolder, "get", counting)
    return told


def cached(stock: Stock, tmp_path: Path) -> Store:
    return Store.open(stock.store().backend, cache=tmp_path / "cached")


def test_a_manifest_is_read_whole_once(
    stock: Stock, tmp_path: Path, read: Counter[str]
) -> None:  # fmt: skip
    first = snapshot_list.proved(cached(stock, tmp_path))
    assert set(read) == {id_of("one"), id_of("two")}
    read.clear()

    again = cached(stock, tmp_path)
    assert snapshot_list.proved(again) == first
    assert prune.survey(again, stock.ring.trusted()).known == first
    assert catalog.find(again, "two") == id_of("two")
    assert not read


def test_a_name_is_found_by_the_beginning_of_manifests(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    sizes = {one.id: one.size for one in stock.store().manifests()}
    monkeypatch.setattr(snapshot_list, "_FIRST", min(sizes.values()) - 96)
    assert catalog.find(stock.store(), "one") == id_of("one")
    assert all(0 < read[id_] < sizes[id_] for id_ in sizes)


def test_a_manifest_that_was_changed_is_read_and_proved_anew(stock: Stock, tmp_path: Path) -> None:
    snapshot_list.proved(cached(stock, tmp_path))
    path = stock.folder / "near/snapshots" / id_of("one")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    os.utime(path, (1, 1))

    told = snapshot_list.proved(cached(stock, tmp_path))
    assert "checksum is wrong" in str(told[id_of("one")])
    assert isinstance(told[id_of("two")], Public)
    path.unlink()
    assert set(snapshot_list.proved(cached(stock, tmp_path))) == {id_of("two")}


@pytest.mark.parametrize("damage", [b"", b"{}", b"x" * 500])
def test_a_damaged_cache_is_read_anew(stock: Stock, tmp_path: Path, damage: bytes) -> None:
    store = cached(stock, tmp_path)
    first = snapshot_list.proved(store)
    assert store.cache is not None
    (store.cache / "publics").write_bytes(damage)
    assert snapshot_list.proved(store) == first


def test_a_head_that_makes_no_sense_is_for_the_whole_to_tell(stock: Stock) -> None:
    data, id_ = stock.store().manifest(id_of("one")), id_of("one")
    assert manifest.head(data[:60000], id_, len(data)) == manifest.decode(data, id_, None).public
    for at in (0, 8, 13, 17, 33):
        wrong = bytearray(data)
        wrong[at] ^= 0x40
        assert manifest.head(bytes(wrong), id_, len(data)) is None
    assert manifest.head(data, id_of("two"), len(data)) is None
    assert manifest.head(data[:40], id_, len(data)) is None


def test_another_store_than_the_one_that_is_meant_is_refused(tmp_path: Path) -> None:
    meant = Store.create(LocalFolder(tmp_path / "near"))
    place = StorePlace(name="near", url=str(tmp_path / "near"))
    assert repository.identified(place).id == meant.id
    assert repository.opened(repository.identified(place)).id == meant.id
    assert repository.opened(place).id == meant.id

    with pytest.raises(
        StoreError,
        match=r"recorded as near on the controller; check that the store is mounted there",
    ):
        repository.opened(replace(place, id="0" * 32))
    (tmp_path / "near/format").unlink()
    with pytest.raises(NotInStore, match=r"is not a store; check that the store is mounted there"):
        repository.opened(replace(place, id=meant.id))
    assert repository.identified(place) == place
