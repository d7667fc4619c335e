"""One snapshot in several stores, and what checks of it found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.make_store_v1 import secret
from tests.support.stocking import Stock, flip, stocked
from vmckpt.app import controller, snapshot_store
from vmckpt.app.snapshot_restore import opened_anywhere
from vmckpt.errors import NotInStore, StoreDamaged
from vmckpt.snapshot.catalog import inspect, opened
from vmckpt.snapshot.verify import results
from vmckpt.snapshot.verify.results import Checked, VerifySummary, verdict
from vmckpt.store.format import manifest
from vmckpt.store.keys.keyring import OwnKey
from vmckpt.store.tiered_reader import TieredReader, others, warnings

PAGES = list(range(40))


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def both(stock: Stock) -> str:
    """A snapshot that is in near and far."""
    id_ = stock.put("one", PAGES)
    assert stock("copy", "one", "--to", "far")[0] == 0
    return id_


def chunks(stock: Stock, id_: str) -> tuple[list[bytes], int, list[str]]:
    """All chunks of a snapshot, how many were borrowed, and what is said of it."""
    known = controller.load_inventory()
    one = opened_anywhere(known, None, id_, None)
    store = snapshot_store.open_store(known, one.store.name)
    looked = inspect(store, id_, one.trusted)
    private, sealing = opened(store, looked, None, one.trusted)
    with TieredReader([store, *others(one.others, None)], sealing) as reader:
        found = list(reader.read_many(private.chunks))
        return found, reader.borrowed, warnings(reader, store)


def test_a_damaged_chunk_comes_from_the_other_store_and_that_is_said(stock: Stock) -> None:
    id_ = both(stock)
    whole, borrowed, said = chunks(stock, id_)
    assert (borrowed, said) == (0, [])
    flip(stock.packs()[0], 5000)

    again, borrowed, said = chunks(stock, id_)
    assert again == whole
    assert borrowed >= 1
    assert ", but read from another store" in said[0]
    assert "verify --repair --from STORE to restore the chunks" in said[0]


def test_a_lost_pack_and_a_lost_index_do_no_harm_either(stock: Stock) -> None:
    id_ = both(stock)
    whole, _, _ = chunks(stock, id_)
    for pack in stock.packs():
        pack.unlink()

    again, borrowed, _ = chunks(stock, id_)
    assert again == whole
    assert borrowed == len(whole)


def test_what_no_store_has_whole_is_damaged_by_the_first_one_s_word(stock: Stock) -> None:
    id_ = both(stock)
    for name in ("near", "far"):
        for pack in stock.packs(name):
            pack.unlink()

    with pytest.raises(StoreDamaged, match="near"):
        chunks(stock, id_)


def test_a_snapshot_that_only_the_far_store_has_is_found_shown_and_proved(stock: Stock) -> None:
    id_ = stock.put("old", [1, 2], in_="far")
    stock.put("new", [3])

    shown = json.loads(stock("show", "old", "--json")[1])
    assert (shown["id"], shown["stores"]) == (id_, ["far"])
    code, told, _ = stock("verify", "old")
    assert (code, f"{stock.folder}/far: 1 snapshot," in told) == (0, True)
    code, _, wrong = stock("show", "none")
    assert (code, wrong.count("has no snapshot 'none'") == 2) == (45, True)
    assert stock("show", "old", "--store", "near")[0] == 45


def test_a_store_that_is_away_or_has_a_damaged_manifest_is_passed_over(stock: Stock) -> None:
    id_ = both(stock)
    near = stock.folder / "near"
    flip(near / "snapshots" / id_, 100)
    assert json.loads(stock("show", "one", "--json")[1])["stores"] == ["far", "near"]
    near.rename(stock.folder / "away")
    assert json.loads(stock("show", "one", "--json")[1])["stores"] == ["far"]
    (stock.folder / "far").rename(stock.folder / "away too")
    code, _, wrong = stock("show", "one")
    assert (code, str(near) in wrong) == (40, True)


# What checks found


def checked(depth: str, at: float, good: bool = True, **more: Any) -> Checked:
    return Checked(
        depth=depth, at=at, good=good, what="" if good else "gone", by="me@here", signer="", **more
    )


@pytest.mark.parametrize(
    ("checks", "good", "depth"),
    [
        ([], None, None),
        ([checked("sealed", 1)], True, "sealed"),
        ([checked("sealed", 1), checked("deep", 2, good=False)], False, "deep"),
        ([checked("deep", 1, good=False), checked("sealed", 2)], False, "deep"),
        ([checked("deep", 1, good=False), checked("boot", 2)], True, "boot"),
        ([checked("sealed", 1, good=False), checked("sealed", 2)], True, "sealed"),
        ([checked("sealed", 3, good=False), checked("deep", 2)], False, "sealed"),
    ],
)
def test_damage_stands_until_a_look_as_deep_finds_none(
    checks: list[Checked], good: bool | None, depth: str | None
) -> None:
    found = verdict(checks)

    assert (found.good, found.last and found.last.depth) == (good, depth)


def test_a_deep_look_is_a_sealed_look_too() -> None:
    looked = verdict([checked("sealed", 1), checked("deep", 5)]).looked_at
    assert looked == {"sealed": 5, "opened": 5, "deep": 5}


def of(stock: Stock, id_: str) -> VerifySummary:
    store = stock.store()
    return verdict(results.load(store, id_, stock.ring.trusted()))


def test_verify_writes_down_what_it_found_and_show_and_list_tell_it(stock: Stock) -> None:
    id_ = both(stock)
    assert "never" in stock("show", "one")[1]
    assert stock("verify")[0] == 0
    assert of(stock, id_).good is True
    assert "good (opened)" in stock("show", "one")[1]
    assert "verified" in stock("list")[1]
    flip(stock.packs()[0], 5000)
    assert stock("verify", "one")[0] == 41
    row = json.loads(stock("list", "--json")[1])[0]["verified"]
    assert (row["good"], row["depth"]) == (False, "opened")
    assert "packs/" in row["what"]
    assert "DAMAGED" in stock("list")[1]
    # The other store has a whole one, and nobody has looked.
    assert json.loads(stock("show", "one", "--store", "far", "--json")[1])["verified"] is None


def test_it_goes_with_its_snapshot_and_what_is_left_behind_is_collected(stock: Stock) -> None:
    id_ = stock.put("one", [1])
    stock("verify")
    path = stock.folder / "near" / "verified" / id_
    raw = path.read_bytes()
    assert stock("delete", "one", "--yes")[0] == 0
    assert not path.exists()
    path.write_bytes(raw)
    for _ in range(2):
        assert stock("gc", "--grace", "0s")[0] == 0
    assert not path.exists()


def test_only_looking_writes_nothing_down(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    stock.put("one", [1])
    monkeypatch.setenv("VMCKPT_READ_ONLY", "1")
    assert stock("verify")[0] == 0
    assert not (stock.folder / "near" / "verified").exists()


def test_a_store_that_takes_nothing_is_proved_all_the_same(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.put("one", [1])

    def refuses(*_: object, **__: object) -> None:
        raise NotInStore("read-only")

    monkeypatch.setattr(results, "record", refuses)
    code, _, wrong = stock("verify")
    assert (code, "the result was not recorded: read-only" in wrong) == (0, True)


def test_nobody_can_claim_what_only_a_trusted_writer_may_say(stock: Stock) -> None:
    id_, other = stock.put("one", [1]), stock.put("two", [2])
    store, ring = stock.store(), stock.ring
    good = checked("deep", 5.0)
    results.record(store, id_, good, OwnKey(secret("a stranger")))
    assert of(stock, id_).good is None, "a stranger's word"

    results.record(store, id_, good, ring.signing())
    assert of(stock, id_).good is True
    raw = store.backend.get(f"verified/{id_}")
    body = manifest.parsed(f"verified/{id_}", raw, "near")
    # Moved to another snapshot, to another store, and with another word in it.
    store.backend.put(f"verified/{other}", manifest.written(f"verified/{other}", body))
    assert of(stock, other).good is None, "said of another snapshot"
    stock("copy", "one", "--to", "far")
    far = stock.store("far")
    far.backend.put(f"verified/{id_}", raw)
    assert results.load(far, id_, ring.trusted()) == (), "said of another store"
    body["checks"][0]["good"] = False
    store.backend.put(f"verified/{id_}", manifest.written(f"verified/{id_}", body), replace=True)
    assert of(stock, id_).good is None, "changed"


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"version": 2, "checks": []},
        {"version": 1, "checks": {"a": 1}},
        {"version": 1, "checks": [None, 3, {}, {"depth": []}]},
        {"version": 1, "checks": [{"depth": "deep", "at": "nan", "good": True, "what": "",
                                   "by": "", "signer": "zz", "signature": "zz"}]},
        {"version": 1, "checks": [{"depth": "deep", "at": 1e999, "good": 1, "what": {},
                                   "by": [], "signer": "00" * 32, "signature": "00"}] * 9999},
        {"version": 1, "checks": [["deep"]] * 100_000},
    ],
)  # fmt: skip
def test_nonsense_is_as_if_nobody_had_looked(stock: Stock, body: Any) -> None:
    id_ = stock.put("one", [1])
    key = f"verified/{id_}"
    stock.store().backend.put(key, manifest.framed(key, json.dumps(body).encode()))

    assert of(stock, id_).good is None
    assert stock("list")[0] == 0
    assert stock("show", "one")[0] == 0
    # A check that comes after it takes its place.
    results.record(stock.store(), id_, checked("sealed", 1.0), stock.ring.signing())
    assert of(stock, id_).good is True


def test_two_writers_do_not_overwrite_each_other(stock: Stock) -> None:
    id_ = stock.put("one", [1])
    store = stock.store()
    friend = OwnKey(secret("a friend"))
    results.record(store, id_, checked("deep", 1.0), friend)
    results.record(store, id_, checked("sealed", 2.0), stock.ring.signing())
    results.record(store, id_, replace(checked("sealed", 3.0), what="x" * 999), friend)

    trusted = stock.ring.trusted() | {friend.public}
    found = results.load(store, id_, trusted)
    assert sorted((one.depth, one.at) for one in found) == [
        ("deep", 1.0), ("sealed", 2.0), ("sealed", 3.0),
    ]  # fmt: skip
    assert max(len(one.what) for one in found) == 200


def test_prune_counts_no_damaged_one_and_keeps_the_last_that_was_proved(stock: Stock) -> None:
    ids = [stock.put(f"n{at}", [at], tags={"schedule": "auto"}) for at in range(5)]
    store, keys = stock.store(), stock.ring.signing()
    results.record(store, ids[1], checked("sealed", 1.0), keys)
    results.record(store, ids[4], checked("sealed", 1.0, good=False), keys)

    told = json.loads(stock("prune", "--keep-last", "1", "--dry-run", "--json")[1])
    stays = {one["id"]: one["reasons"] for one in told["snapshots"] if one["stays"]}
    assert stays == {
        ids[3]: ["the newest snapshot", "last 1 of 1"], ids[1]: ["the newest verified snapshot"],
    }  # fmt: skip
