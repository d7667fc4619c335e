"""vmckpt snapshot show, diff and verify, and how snapshots are named."""

import json
import re
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from tests.fixtures.make_store_v1 import secret
from tests.support.stocking import Stock, flip, id_of, stocked
from vmckpt.snapshot.catalog import match_ids
from vmckpt.store.format import manifest
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.keyring import OwnKey

STRANGER = OwnKey(secret("a stranger"))


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("s-aab", "s-aab"),
        ("s-aa", "s-aab s-aac"),
        ("s-b", "s-bbb"),
        ("nightly", "s-aac s-bbb"),
        ("weekly", "s-aab"),
        ("week", ""),
        ("s-", ""),
        ("s-c", "s-ccc s-ddd"),
        ("", ""),
    ],
)
def test_a_word_means_an_id_the_beginning_of_one_or_a_name(word: str, found: str) -> None:
    names = {
        "s-aab": "weekly", "s-aac": "nightly", "s-bbb": "nightly", "s-ccc": None, "s-ddd": "s-c",
    }  # fmt: skip
    assert " ".join(match_ids(word, names)) == found


def test_a_snapshot_is_named_in_any_clear_way_and_an_unclear_one_names_all(stock: Stock) -> None:
    first, second = stock.put("monday", [1]), stock.put("tuesday", [2], name="monday")

    assert stock("show", first[:7])[0] == 0
    code, _, told = stock("show", "monday")
    assert code == 2
    assert len(told.splitlines()) == 1
    assert first in told
    assert second in told
    assert "use the snapshot's ID" in told
    code, _, told = stock("show", "sunday")
    assert (code, "has no snapshot 'sunday'; run vmckpt snapshot list" in told) == (45, True)


def test_show_tells_the_public_part_without_a_key_and_for_whom_it_is(stock: Stock) -> None:
    stock.encrypt()
    id_ = stock.put("before", [1, -1, 2])

    code, told, _ = stock("show", "before", "--json")
    shown = json.loads(told)
    assert (code, shown["id"], shown["private"], shown["encrypted"]) == (0, id_, None, True)
    assert shown["keys"] == [stock.ring.admins()[0].fingerprint]
    assert "alice (" in stock("show", "before")[1]


def test_show_opens_it_with_an_identity(stock: Stock) -> None:
    key = str(stock.encrypt())
    stock.put("before", [1, -1, 2])

    shown = json.loads(stock("show", "before", "--identity", key, "--json")[1])["private"]
    assert [one["name"] for one in shown["regions"]] == ["pc.ram", "vda"]
    assert shown["disks"][0] == {
        "target": "vda", "format": "qcow2", "bytes": 65536, "options": "compat=1.1",
    }  # fmt: skip
    assert shown["warnings"] == ["the file systems were not frozen"]
    told = stock("show", "before", "--identity", key)[1]
    assert "the file systems were not frozen" in told
    assert stock("show", "before", "--identity", key, "--xml")[1].startswith("<domain>\n  <name>")


def test_a_wrong_identity_still_sees_for_whom_it_is(stock: Stock) -> None:
    stock.encrypt()
    stock.put("before", [1])
    assert stock("keys", "new", "other.key", "--no-passphrase")[0] == 0

    code, told, wrong = stock("show", "before", "--identity", "other.key")
    assert (code, "alice (" in told, len(wrong.splitlines())) == (43, True, 1)
    assert "is not encrypted for this identity" in wrong
    for command in (("verify", "--deep"), ("diff", "before", "before")):
        code, _, wrong = stock(*command, "--identity", "other.key")
        assert (code, len(wrong.splitlines())) == (43, 1)
    code, _, wrong = stock("diff", "before", "before")
    assert (code, "is encrypted; give an identity file with --identity" in wrong) == (43, True)


def test_diff_says_what_changed_of_each_region(stock: Stock) -> None:
    key = str(stock.encrypt())
    first = stock.put("monday", [1, 2, 3, 4, -1, 5, 6, 7])
    stock.put("tuesday", [1, 2, 3, 4, -1, 5, 9, -1], parent=first, disk=2)

    told = json.loads(stock("diff", "monday", "tuesday", "--identity", key, "--json")[1])
    assert told["follows"]
    assert {one["name"]: one["changed_bytes"] for one in told["regions"]} == {
        "pc.ram": 3 * 4096, "vda": 65536,
    }  # fmt: skip
    code, told, _ = stock("diff", "monday", "tuesday", "--identity", key)
    assert (code, "changed: at most 76 KiB" in told) == (0, True)
    assert "is not based on" in stock("diff", "tuesday", "monday", "--identity", key)[1]


def test_a_whole_store_is_whole_at_any_depth(stock: Stock) -> None:
    stock.put("open", [1, 2])
    key = str(stock.encrypt())
    stock.put("one", list(range(20)))
    stock.put("two", [*range(10), *range(50, 55)])

    for args, opened, chunks in (
        ((), 1, 0), (("--sealed", "--identity", key), 0, 0), (("--identity", key), 3, 0),
        (("--identity", key, "--deep"), 3, 16), (("one", "--deep", "--identity", key), 1, 7),
        (("open", "--deep"), 1, 3), (("one", "two", "--sealed"), 0, 0),
    ):  # fmt: skip
        code, told, wrong = stock("verify", "--json", *args)
        told_ = json.loads(told)
        assert (code, told_["good"], wrong) == (0, True, "")
        assert (told_["opened"], told_["chunks_read"]) == (opened, chunks), args
    code, told, _ = stock("verify")
    assert "3 snapshots, 1 of them opened" in told
    assert "all intact" in told


def test_verify_takes_either_sealed_or_deep(stock: Stock) -> None:
    assert stock("verify", "--sealed", "--deep")[0] == 2


def test_deep_says_so_if_it_could_not_open_what_it_should_read(stock: Stock) -> None:
    stock.encrypt()
    id_ = stock.put("one", [1])

    code, told, wrong = stock("verify", "--deep")
    assert (code, "all intact" in told) == (43, True)
    why = "it is encrypted, and no identity was given"
    assert f"could not open snapshot {id_}: {why}" in wrong


def files_of(stock: Stock) -> list[Path]:
    kinds = ("format", "packs/*/*", "snapshots/*", "wraps/*", "pins/*")
    return [path for kind in kinds for path in sorted((stock.folder / "near").glob(kind))]


def test_one_flipped_bit_anywhere_is_found_and_named(stock: Stock) -> None:
    key = str(stock.encrypt())
    one, two = stock.put("one", list(range(12))), stock.put("two", [*range(4), 40])
    stock.store().pin(two)
    for path in files_of(stock):
        before = path.read_bytes()
        for at in {0, 9, len(before) // 2, len(before) - 1}:
            flip(path, at, 0x10)
            code, told, wrong = stock("verify", "--identity", key, "--json")
            named = str(path.relative_to(stock.folder / "near"))
            assert (code, len(wrong.splitlines())) == (41, 1), (named, at)
            if named != "format":
                found = {flaw["object"]: flaw for flaw in json.loads(told)["wrong"]}
                assert named in found
                assert sum(flaw["object"] == named for flaw in json.loads(told)["wrong"]) == 1
                # And by who looks at these two alone and knows no index; a pin is no part of them.
                shutil.rmtree(stock.folder / "state" / "cache", ignore_errors=True)
                code, told, _ = stock("verify", one, two, "--identity", key, "--json")
                alone = [flaw["object"] for flaw in json.loads(told)["wrong"]]
                assert (code, named in alone) == ((0, False) if "pins" in named else (41, True))
            path.write_bytes(before)
    assert stock("verify", "--deep", "--identity", key)[0] == 0


def test_a_damaged_chunk_is_named_with_the_snapshots_that_need_it(stock: Stock) -> None:
    stock.put("one", list(range(4)), disk=1)
    only = stock.put("two", list(range(4, 12)), disk=1)
    broken = next(path for path in stock.packs() if stock_pack(stock, path) == {only})
    flip(broken, 40)

    code, told, wrong = stock("verify")
    assert code == 41
    assert f"needed by {only}" in told
    assert re.search(r": chunk \w+ at offset \d+ is damaged", told)
    assert " objects are damaged" in wrong
    assert stock("verify", "one", "--deep")[0] == 0
    code, told, _ = stock("verify", "two", "--deep")
    assert (code, "of its 4 chunks damaged or missing" in told) == (41, True)


def stock_pack(stock: Stock, path: Path) -> set[str]:
    """Which snapshots need a pack."""
    store = stock.store()
    rows = store.catalog.load().index.runs
    names = {
        entry["name"].tobytes()
        for run in rows
        for entry in run.entries
        if run.packs[entry["pack"]].id == path.name
    }
    return {
        one.id
        for one in store.manifests()
        if names & set(manifest.references(store.manifest(one.id)))
    }


def test_a_missing_chunk_is_told_by_all_who_need_it(stock: Stock) -> None:
    key = str(stock.encrypt())
    id_ = stock.put("one", list(range(4)))
    for path in stock.packs():
        path.unlink()

    code, told, wrong = stock("verify", "--identity", key)
    what = f"snapshots/{id_}: 3 of its 3 chunks without an intact copy"
    assert (code, what in told) == (41, True)
    assert len(wrong.splitlines()) == 1
    code, _, wrong = stock("copy", "one", "--to", "far")
    assert code == 41
    why = r"no intact pack has chunk \w{16} and 2 more; run vmckpt snapshot verify"
    assert re.search(why, wrong)
    assert stock("export", "one", "file")[0] == 41
    assert not (stock.folder / "file").exists()
    assert list(stock.folder.glob(".file*")) == []
    code, _, wrong = stock("gc")
    assert (code, "3 missing chunks that snapshots need" in wrong) == (41, True)


def test_a_newer_manifest_is_no_damage_but_stops_what_must_know_all(stock: Stock) -> None:
    stock.put("one", [1])
    data = bytearray(stock.store().manifest(id_of("one")))
    data[8] = 2
    newer = id_of("newer")
    stock.store().backend.put(f"snapshots/{newer}", resealed(bytes(data)))

    for args in (
        ("verify",),
        ("verify", newer),
        ("gc",),
        ("show", newer),
        ("copy", newer, "--to", "far"),
    ):
        code, _, wrong = stock(*args)
        assert (code, len(wrong.splitlines())) == (42, 1 + (args[0] == "gc")), args
        assert "has version 2; this vmckpt supports versions up to 1" in wrong
        assert "snapshots/" in wrong
    assert stock("verify", "one")[0] == 0
    assert stock("delete", "one", "--yes")[0] == 0


def resealed(data: bytes) -> bytes:
    return data[:-32] + blake3(data[:-32]).digest()


def test_a_manifest_in_another_ones_place_is_found(stock: Stock) -> None:
    stock.put("one", [1])
    stock.put("two", [2])
    folder = stock.folder / "near" / "snapshots"
    (folder / id_of("one")).write_bytes((folder / id_of("two")).read_bytes())

    code, told, _ = stock("verify", "--sealed")
    assert (code, f"it is the manifest of {id_of('two')}" in told) == (41, True)


def test_what_a_stranger_signed_is_told_and_not_opened(stock: Stock) -> None:
    stock.put("one", [1])
    id_ = stock.put("two", [2], signer=STRANGER)

    code, told, wrong = stock("verify")
    assert (code, f"snapshots/{id_}: its writer is not trusted" in told) == (43, True)
    assert "keys trust NAME KEY" in wrong
    code, told, wrong = stock("show", "two")
    assert (code, "writer not trusted" in told) == (43, True)
    key = wrong.split("keys trust NAME ")[1].strip()
    assert stock("keys", "trust", "other", key)[0] == 0
    assert stock("verify")[0] == 0
    assert stock("show", "two")[0] == 0


@pytest.mark.parametrize("how", ["gone", "another's", "another key", "not for her"])
def test_wraps_that_do_not_open_their_snapshot_are_found(stock: Stock, how: str) -> None:
    key = str(stock.encrypt())
    id_, other = stock.put("one", [1]), stock.put("two", [2])
    store, admins = stock.store(), [one.key for one in stock.ring.admins()]
    if how == "gone":
        store.backend.delete(f"wraps/{id_}")
    elif how == "another's":
        store.put_wraps(id_, store.wraps(other) or b"")
    elif how == "another key":
        store.put_wraps(id_, wrapped_keys.wrap(secret("wrong"), id_, admins))
    else:
        store.put_wraps(id_, b"nonsense")

    code, told, _ = stock("verify", "--identity", key)
    assert code == 41
    assert f"wraps/{id_}: " in told
    assert stock("verify", "two", "--identity", key)[0] == 0
    # What anybody can wrap for her must not take the place of what opens it for others.
    before = store.wraps(id_)
    code, told, _ = stock("keys", "rotate", "--identity", key, "--yes")
    assert (code, f"unchanged: {id_}" in told) == (41, True)
    assert store.wraps(id_) == before
