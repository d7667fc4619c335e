"""Wrong boxes under right names: who gives them harms no snapshot but those he gave himself."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.stocking import Stock, flip, id_of, stocked
from vmckpt.snapshot import catalog
from vmckpt.store import gc
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import pack
from vmckpt.store.repository import Store
from vmckpt.units import Seconds

JUNK = b"this is nobody's box"


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    stock = stocked(tmp_path, monkeypatch, capsys)
    # A third store: somebody's who does harm.
    (tmp_path / "hosts.yaml").write_text(
        "hosts: {alpha: {uri: 'test:///default'}}\n"
        f"stores: {{near: {tmp_path}/near, far: {tmp_path}/far, evil: {tmp_path}/evil}}\n"
    )
    Store.create(LocalFolder(tmp_path / "evil"))
    return stock


def kinds(stock: Stock, in_: str) -> dict[bool, int]:
    """How many packs are foreign, and how many are not."""
    found = [one.foreign for one in stock.store(in_).catalog.load().index.packs().values()]
    return {kind: found.count(kind) for kind in set(found)}


def poison(stock: Stock, in_: str) -> None:
    """Put another box under every name, in packs that are whole."""
    for path in stock.packs(in_):
        index = pack.parse(path.name, path.read_bytes())
        lies = [(name, JUNK, plain) for name, _, _, plain, _ in index.rows.tolist()]
        data = pack.encode(lies, os.urandom(16), index.generation, foreign=index.foreign)
        path.unlink()
        stock.store(in_).backend.put(pack.key_of(blake3(data).hexdigest()), data)


def deep(stock: Stock, store: str, *names: str) -> int:
    key = str(stock.identity("alice"))
    return stock("verify", *names, "--deep", "--identity", key, "--store", store)[0]


def collect(stock: Stock, in_: str) -> None:
    for _ in range(4):
        told = gc.collect(
            stock.store(in_), catalog.references, grace=Seconds(0.0), life=Seconds(0.0)
        )
        assert told.missing == 0


def by_copy(stock: Stock, name: str) -> None:
    assert stock("copy", name, "--store", "evil", "--to", "near")[0] == 0


def by_import(stock: Stock, name: str) -> None:
    assert stock("export", name, "evil.file", "--store", "evil")[0] == 0
    assert stock("import", "evil.file", "--store", "near")[0] == 0


@pytest.fixture(params=[by_copy, by_import])
def poisoned(stock: Stock, request: pytest.FixtureRequest) -> Stock:
    """`near` has taken a snapshot whose boxes are all wrong."""
    give: Callable[[Stock, str], None] = request.param
    stock.encrypt()
    stock.put("one", list(range(32)), in_="far")
    assert stock("copy", "one", "--store", "far", "--to", "evil")[0] == 0
    poison(stock, "evil")
    give(stock, "one")
    # Nobody can see it without the key; with it, it is found.
    assert stock("verify", "--sealed")[0] == 0
    assert deep(stock, "near") == 41
    return stock


def test_a_snapshot_that_is_made_later_counts_on_no_wrong_box(poisoned: Stock) -> None:
    poisoned.put("two", list(range(32)))

    assert deep(poisoned, "near", "two") == 0
    # With the right boxes there, the one that was given is whole, too.
    assert deep(poisoned, "near", "one") == 0
    collect(poisoned, "near")
    assert deep(poisoned, "near") == 0
    assert set(kinds(poisoned, "near")) == {False}


def test_a_snapshot_that_is_copied_later_brings_its_own_boxes(poisoned: Stock) -> None:
    poisoned.put("two", list(range(32)), in_="far")
    assert poisoned("copy", "two", "--store", "far", "--to", "near")[0] == 0

    assert deep(poisoned, "near", "two") == 0
    collect(poisoned, "near")
    assert deep(poisoned, "near") == 0
    # What is copied on takes all boxes along, for nobody knows the right ones.
    Store.create(LocalFolder(poisoned.folder / "far2"))
    hosts = poisoned.folder / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace("{near:", f"{{far2: {poisoned.folder}/far2, near:"))
    assert poisoned("copy", "two", "--store", "near", "--to", "far2")[0] == 0
    assert poisoned("export", "two", "file")[0] == 0
    assert deep(poisoned, "far2") == 0


def test_the_same_snapshot_from_an_honest_store_mends_it(poisoned: Stock) -> None:
    told = poisoned("copy", "one", "--store", "far", "--to", "near")
    assert (told[0], re.search(r"; restored \d+ missing chunk", told[1]) is not None) == (0, True)

    assert deep(poisoned, "near") == 0
    assert "missing chunks" not in poisoned("copy", "one", "--store", "far", "--to", "near")[1]


def test_the_right_box_stays_while_its_pack_is_condemned(poisoned: Stock) -> None:
    """An own pack that is about to go is needed again; a foreign one has the same names."""
    poisoned.put("two", list(range(32)))
    store = poisoned.store()
    store.delete(id_of("two"))
    store.delete(id_of("one"))
    gc.collect(store, catalog.references, grace=Seconds(0.0))  # condemns all of it
    by_copy(poisoned, "one")
    store.delete(id_of("one"))
    by_copy(poisoned, "one")

    collect(poisoned, "near")
    assert deep(poisoned, "near") == 0


def test_a_second_copy_writes_little_and_collections_keep_packs_apart(stock: Stock) -> None:
    stock.encrypt()
    stock.put("one", list(range(64)))
    stock.put("two", [*range(60), 90, 91])
    assert stock("copy", "one", "two", "--to", "far")[0] == 0
    again = stock("copy", "one", "two", "--to", "far")
    assert again[1].count("already in far\n") == 2
    for number in range(100, 112):
        stock.put(f"own {number}", [number], in_="far", disk=number)
        stock.put(f"given {number}", [number + 100], disk=number + 100)
        assert stock("copy", f"given {number}", "--to", "far")[0] == 0
    assert kinds(stock, "far") == {False: 12, True: 14}

    collect(stock, "far")
    assert kinds(stock, "far") == {False: 1, True: 1}
    assert deep(stock, "far") == 0


def test_what_is_not_encrypted_is_looked_at_and_is_as_good_as_our_own(stock: Stock) -> None:
    stock.put("one", list(range(8)), in_="evil")
    assert stock("copy", "one", "--store", "evil", "--to", "near")[0] == 0
    assert kinds(stock, "near") == {False: 1}
    poison(stock, "evil")

    code, _, wrong = stock("copy", "one", "--store", "evil", "--to", "far")
    assert (code, "chunk" in wrong, len(wrong.splitlines())) == (41, True, 1)
    assert stock.store("far").manifests() == []


def test_damage_in_a_foreign_pack_is_found_and_named(stock: Stock) -> None:
    stock.encrypt()
    stock.put("one", list(range(8)))
    assert stock("copy", "one", "--to", "far")[0] == 0
    [path] = stock.packs("far")
    data = path.read_bytes()
    for at in (*range(40), *range(len(data) - 64, len(data))):
        flip(path, at)
        assert stock("verify", "--store", "far", "--sealed")[0] == 41, at
        path.write_bytes(data)
    assert stock("verify", "--store", "far")[0] == 0
