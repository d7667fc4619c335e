"""Snapshots that go from store to store without a key."""

from pathlib import Path

import pytest

from tests.support.stocking import Stock, flip, stocked
from vmckpt.errors import BadInput, NotInStore, StoreDamaged
from vmckpt.snapshot import copy
from vmckpt.snapshot.verify import verify
from vmckpt.snapshot.verify.verify import Depth


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def copied(stock: Stock, id_: str) -> copy.Moved:
    return copy.copy(stock.store(), stock.store("far"), id_)


def flaws(stock: Stock, store: str = "far") -> list[str]:
    found = verify.prove(
        stock.store(store), (), Depth.SEALED, trusted=stock.ring.trusted(), identity=None
    )
    return [str(one) for one in found.flaws]


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_copy_is_whole_and_only_what_is_lacking_is_written(stock: Stock, encrypts: bool) -> None:
    if encrypts:
        stock.encrypt()
    one, two = stock.put("one", [1, 2, 3, 4]), stock.put("two", [1, 2, 3, 4, 5, 6, 7, 8])
    first = copied(stock, one)
    second = copied(stock, two)

    assert flaws(stock) == []
    assert stock.store("far").manifest(two) == stock.store().manifest(two)
    assert stock.store("far").wraps(two) == stock.store().wraps(two)
    assert (first.already, first.encrypted, first.chunks_new) == (False, encrypts, first.chunks)
    assert second.chunks_new == 1
    assert second.bytes_new < first.bytes_new


def test_what_is_there_already_is_told_and_nothing_is_written(stock: Stock) -> None:
    one = stock.put("one", [1, 2])
    copied(stock, one)
    before = stock.packs("far")
    again = copied(stock, one)

    assert (again.already, again.chunks_new, again.bytes_new) == (True, 0, 0)
    assert stock.packs("far") == before
    assert again.as_json()["already_there"] is True


@pytest.mark.parametrize("lost", ["packs", "manifest", "both"])
def test_a_copy_brings_back_what_the_target_has_lost(stock: Stock, lost: str) -> None:
    one = stock.put("one", [1, 2])
    copied(stock, one)
    for pack in stock.packs("far") if lost != "manifest" else []:
        pack.unlink()
    if lost != "packs":
        (stock.folder / "far/snapshots" / one).write_bytes(b"damaged")
    assert flaws(stock) != []
    copied(stock, one)

    assert flaws(stock) == []


def test_what_is_damaged_at_its_source_is_not_copied(stock: Stock) -> None:
    one = stock.put("one", [1, 2])
    (pack,) = stock.packs()
    flip(pack, 60)
    with pytest.raises(StoreDamaged, match="no intact pack has chunk"):
        copied(stock, one)

    assert stock.store("far").manifests() == []


def test_neither_onto_itself_nor_over_another_snapshot(stock: Stock) -> None:
    one = stock.put("one", [1])
    stock.put("one", [2], in_="far", name="another")
    with pytest.raises(BadInput, match="are the same store"):
        copy.copy(stock.store(), stock.store(), one)
    with pytest.raises(BadInput, match=f"already has a different snapshot {one}"):
        copied(stock, one)
    with pytest.raises(NotInStore):
        copied(stock, "s-none")
