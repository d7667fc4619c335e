"""The far tier in a bucket, and what a service reads of stores again and again."""

from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.bucket import CREDENTIALS, Server
from tests.support.services import World
from tests.support.stocking import Stock, flip, stocked
from vmckpt.errors import StoreError
from vmckpt.scheduler.store_cache import Shelves
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.repository import Store


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of a store in a bucket."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    s3_server.bucket("service-far")
    return f"s3://service-far/far?endpoint={s3_server.endpoint}"


async def test_snapshots_land_near_and_are_copied_into_a_bucket(
    stock: Stock, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = stock.folder / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace(f"far: {stock.folder}/far", f"far: '{bucket}'"))
    Store.create(backend_of(bucket))
    world = World(stock, monkeypatch)
    assert await world.run(limit=60) == 0

    far = Store.open(backend_of(bucket))
    assert {one.id for one in far.manifests()} == world.has("near")
    checked = [one.key for one in far.backend.keys("verified/")]
    assert len(checked) >= 1
    assert world.said("copied")[0].endswith("new")


class Counting(Store):
    """Says how often its manifests are read."""

    read: ClassVar[Counter[str]] = Counter()

    def manifest(self, id_: str) -> bytes:
        self.read[id_] += 1
        return super().manifest(id_)


def test_manifests_are_read_once_and_what_is_gone_is_forgotten(stock: Stock) -> None:
    ids = [stock.put(f"n{at}", [at], tags={"schedule": "auto"}) for at in range(3)]
    store = Counting(stock.store().backend, stock.store().id, None)
    shelves = Shelves(lambda _: store, stock.ring.trusted)
    Counting.read.clear()
    assert set(shelves.look("near")) == set(ids)
    store.delete(ids[0])
    assert set(shelves.look("near")) == set(ids[1:])
    assert set(Counting.read.values()) == {1}
    assert len(shelves._public) == 2


def test_damage_and_strangers_are_on_no_shelf_and_a_store_comes_back(stock: Stock) -> None:
    good, bad = stock.put("good", [1]), stock.put("bad", [2])
    flip(stock.folder / "near" / "snapshots" / bad, 90)
    opened = []

    def open_(name: str) -> Store:
        opened.append(name)
        return stock.store(name)

    shelves = Shelves(open_, stock.ring.trusted)
    assert set(shelves.look("near")) == {good}
    assert set(Shelves(stock.store, frozenset).look("near")) == set()
    (stock.folder / "near").rename(stock.folder / "away")
    with pytest.raises(StoreError):
        shelves.look("near")
    (stock.folder / "away").rename(stock.folder / "near")
    assert set(shelves.look("near")) == {good}
    assert opened == ["near"] * 3  # it is asked each time whether it is still there
