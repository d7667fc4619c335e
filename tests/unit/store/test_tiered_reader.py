"""Chunks that the near store has lost come from another one."""

from pathlib import Path

import pytest

from tests.support.storing import SEALING, chunks, new_store, parsed, write
from vmckpt.errors import StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.store import tiered_reader
from vmckpt.store.repository import Store
from vmckpt.store.tiered_reader import TieredReader

NUMBERS = range(6)


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Store, Store]:
    """Both have the same chunks, in packs of their own."""
    near, far = new_store(tmp_path / "near"), new_store(tmp_path / "far")
    for store in (near, far):
        write(store, "one", chunks(*NUMBERS))
    return near, far


def lose(store: Store) -> None:
    for one in list(store.backend.keys("packs/")):
        store.backend.delete(one.key)


def read(near: Store, *others: Store) -> tuple[list[bytes], TieredReader]:
    digests, _ = parsed(near.manifest("one"))
    with TieredReader([near, *others], SEALING) as reader:
        reader.expect(digests)
        return [reader.read(one) for one in digests], reader


def test_nobody_else_is_asked_for_what_the_near_store_has(stores: tuple[Store, Store]) -> None:
    near, far = stores
    lose(far)
    found, reader = read(near, far)

    assert found == chunks(*NUMBERS)
    assert reader.borrowed == 0
    assert tiered_reader.warnings(reader, near) == []


def test_what_it_has_lost_comes_from_the_next_one_and_that_is_said(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    near, far = stores
    lose(near)
    found, reader = read(near, new_store(tmp_path / "empty"), far)

    assert found == chunks(*NUMBERS)
    assert reader.borrowed == len(NUMBERS)
    (warning,) = tiered_reader.warnings(reader, near)
    assert warning.startswith(
        f"6 chunks unreadable in {near.backend.where}, but read from another store"
    )


def test_what_no_store_has_is_told_of_the_near_one(stores: tuple[Store, Store]) -> None:
    for store in stores:
        lose(store)
    with pytest.raises(StoreError, match=stores[0].backend.where):
        read(*stores)


def test_stores_that_are_away_or_others_are_not_asked(stores: tuple[Store, Store]) -> None:
    near, far = stores
    places = [
        StorePlace(name="far", url=far.backend.where, id=far.id),
        StorePlace(name="away", url="/nowhere/at/all"),
        StorePlace(name="wrong", url=near.backend.where, id="another"),
        StorePlace(name="odd", url="ftp://x"),
    ]

    assert [one.id for one in tiered_reader.others(places, None)] == [far.id]
