"""vmckpt snapshot init and list: what a store has, and what is noted beside it."""

import json

from tests.fixtures.make_store_v1 import secret
from tests.support.stocking import Stock, flip, stock
from vmckpt.store.keys.keyring import OwnKey

__all__ = ["stock"]


def test_a_store_is_made_once_and_where_the_inventory_says(stock: Stock) -> None:
    (stock.folder / "far").rename(stock.folder / "away")
    code, _, said = stock("init", "--store", "far")
    assert (code, said) == (0, f"created store {stock.folder}/far\n")
    assert list(stock.store("far").manifests()) == []
    assert stock("init", "--store", "far")[0] == 2
    assert stock("init", "--store", "nowhere")[0] == 3


def test_the_list_has_the_oldest_first_and_only_what_was_asked_for(stock: Stock) -> None:
    first = stock.put("one", [1, 2])
    uuid = "11111111-be04-4dd1-80ff-c8e5fa28580b"
    other = stock.put("two", [3], guest="db1", guest_uuid=uuid)
    far = stock.put("three", [4], in_="far")

    def ids(*words: str) -> list[str]:
        code, told, _ = stock("list", *words, "--json")
        assert code == 0
        return [one["id"] for one in json.loads(told)]

    assert ids() == [first, other]
    assert ids("db1") == ids(uuid) == [other]
    assert ids("nobody") == []
    assert ids("--store", "far") == [far]


def test_what_is_to_be_known_of_a_snapshot_is_noted(stock: Stock) -> None:
    plain = stock.put("plain", [1, 2])
    stock.store().pin(plain)
    stock.encrypt()
    sealed = stock.put("sealed", [3], signer=OwnKey(secret("a stranger")))

    rows = {line.split()[0]: line.rstrip() for line in stock("list")[1].splitlines()}
    assert rows[plain].endswith("alpha, pinned, not encrypted")
    assert rows[sealed].endswith("alpha, writer not trusted")
    assert "2025-01-01 01:00" in rows[plain]
    first, second = json.loads(stock("list", "--json")[1])
    assert (first["pinned"], first["encrypted"], first["trusted"]) == (True, False, True)
    assert (second["pinned"], second["encrypted"], second["trusted"]) == (False, True, False)
    assert first["memory_bytes"] == 8192


def test_one_that_cannot_be_read_is_last_with_what_is_wrong(stock: Stock) -> None:
    broken, whole = stock.put("broken", [1]), stock.put("whole", [2])
    flip(stock.folder / "near" / "snapshots" / broken, 400)
    code, told, _ = stock("list")
    assert code == 0
    _, first, last = told.splitlines()
    assert (first.split()[0], last.split()[0]) == (whole, broken)
    assert "its checksum is wrong" in last
    first, last = json.loads(stock("list", "--json")[1])
    assert (first["id"], first["wrong"]) == (whole, None)
    assert (last["id"], last["guest"], set(last)) == (broken, None, set(first))
    assert "its checksum is wrong" in last["wrong"]
