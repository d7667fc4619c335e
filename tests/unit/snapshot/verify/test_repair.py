"""What is damaged in a store is taken away, what is whole is saved, the rest is brought back."""

import json
import re
from pathlib import Path

import pytest

from tests.support.stocking import Stock, flip, id_of, stocked
from vmckpt.store import fault_injection, pending_deletion
from vmckpt.store.format import pack


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def deep(stock: Stock, store: str = "near") -> int:
    key = str(stock.identity("alice"))
    return stock("verify", "--deep", "--identity", key, "--store", store)[0]


def first_box(path: Path) -> int:
    return int(pack.parse(path.name, path.read_bytes()).rows[0]["offset"])


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_damaged_pack_comes_back_from_another_store(stock: Stock, encrypted: bool) -> None:
    if encrypted:
        stock.encrypt()
    stock.put("one", list(range(40)))
    stock.put("two", [*range(36), 90])
    assert stock("copy", "one", "--to", "far")[0] == 0
    big = stock.packs()[0]
    flip(big, first_box(big))
    code, said, wrong = stock("verify")
    assert (code, f"needed by {', '.join(sorted(map(id_of, ('one', 'two'))))}" in said) == (
        41,
        True,
    )
    assert "vmckpt snapshot verify --repair --from STORE" in wrong

    code, said, _ = stock("verify", "--repair")
    assert (code, "1 chunk still missing" in said, big.exists()) == (41, True, False)
    code, said, _ = stock("verify", "--repair", "--from", "far", "--json")
    told = json.loads(said)["repaired"]
    assert (code, told["boxes_brought"], told["chunks_lost"]) == (0, 1, {})
    assert deep(stock) == 0


def test_all_of_it_at_once_and_without_an_index(stock: Stock) -> None:
    stock.encrypt()
    stock.put("one", list(range(100)))
    assert stock("copy", "one", "--to", "far")[0] == 0
    for path in stock.packs():
        flip(path, path.stat().st_size - 70)  # in the index: what it holds is not known
    assert stock("verify")[0] == 41
    code, said, _ = stock("verify", "--repair", "--json")
    assert (code, len(json.loads(said)["repaired"]["left"])) == (41, len(stock.packs()))

    assert stock("verify", "--repair", "--from", "far")[0] == 0
    assert deep(stock) == 0


def test_a_store_without_any_other_saves_what_is_whole(stock: Stock) -> None:
    stock.put("one", list(range(8)))
    stock.put("two", list(range(20, 60)), disk=9)
    big = stock.packs()[0]
    flip(big, first_box(big))
    assert stock("verify", "--repair")[0] == 41
    assert stock("verify", "one", "--deep")[0] == 0
    # Who has the content stores it anew.
    stock.put("three", list(range(20, 60)), disk=9)
    assert stock("verify", "--deep")[0] == 0


@pytest.mark.parametrize("what", ["snapshots", "wraps"])
@pytest.mark.parametrize("by", ["copy", "import", "repair"])
def test_a_damaged_manifest_and_damaged_wraps_come_back(stock: Stock, what: str, by: str) -> None:
    stock.encrypt()
    id_ = stock.put("one", [1, 2])
    assert stock("copy", "one", "--to", "far")[0] == 0
    assert stock("export", "one", "file")[0] == 0
    flip(stock.folder / "near" / what / id_, 40)
    assert stock("verify")[0] == 41
    ways = {
        "copy": ("copy", id_, "--store", "far", "--to", "near"),
        "import": ("import", "file"),
        "repair": ("verify", "--repair", "--from", "far"),
    }
    assert stock(*ways[by])[0] == 0
    assert deep(stock) == 0
    assert list(stock.store().backend.keys("locks/")) == []


def test_a_missing_pack_comes_back_by_a_copy_alone(stock: Stock) -> None:
    stock.encrypt()
    stock.put("one", list(range(40)))
    assert stock("copy", "one", "--to", "far")[0] == 0
    stock.packs()[0].unlink()
    assert stock("verify", "--sealed")[0] == 41
    code, said, _ = stock("copy", "one", "--store", "far", "--to", "near")
    assert (code, re.search(r"; restored \d+ missing chunks", said) is not None) == (0, True)
    assert deep(stock) == 0


def test_small_objects_that_stand_in_the_way_go(stock: Stock) -> None:
    stock.put("one", [1])
    assert stock("pin", "one", "--why", "audit")[0] == 0
    token = pending_deletion.write(stock.store().backend, ["wraps/gone"])
    for name in (f"condemned/{token}", f"pins/{id_of('one')}"):
        flip(stock.folder / "near" / name, 2)
    code, _, wrong = stock("gc")
    assert (code, f"condemned/{token}" in wrong) == (41, True)

    assert stock("verify", "--repair")[0] == 0
    assert stock("gc")[0] == 0
    assert stock("delete", "one", "--yes")[0] == 2, "it is pinned still"


def test_a_repair_that_is_killed_is_done_again(stock: Stock) -> None:
    stock.encrypt()
    stock.put("one", list(range(100)))
    assert stock("copy", "one", "--to", "far")[0] == 0
    for path in stock.packs():
        flip(path, first_box(path))
    whole = {
        path: path.read_bytes() for path in (stock.folder / "near").rglob("*") if path.is_file()
    }

    class Killed(BaseException):
        pass

    moments = [0]

    def listener(point: str) -> None:
        moments[0] -= point != "lock: released"
        if moments[0] == 0:
            fault_injection.listen(None)
            raise Killed

    for moment in range(1, 200, 6):
        moments[0] = moment
        fault_injection.listen(listener)
        try:
            assert stock("verify", "--repair", "--from", "far", "--sealed")[0] == 0
        except Killed:
            fault_injection.listen(None)
            # A quarter of an hour later the lock of who was killed is void.
            stock.store().backend.delete("locks/gc")
            assert stock("verify", "--repair", "--from", "far", "--sealed")[0] == 0, moment
            stock.capsys.readouterr()
        fault_injection.listen(None)
        if moments[0] > 0:
            break
        for path in (stock.folder / "near").rglob("*"):
            if path.is_file() and path not in whole:
                path.unlink()
        for path, data in whole.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
    assert 10 < moment < 190
    assert deep(stock) == 0


def test_what_makes_no_sense_is_refused(stock: Stock) -> None:
    stock.put("one", [1])
    for args in (("--from", "far"), ("one", "--repair"), ("--repair", "--from", "near")):
        code, _, wrong = stock("verify", *args)
        assert (code, len(wrong.splitlines())) == (2, 1), wrong


def test_nothing_is_done_to_a_store_that_is_whole(stock: Stock) -> None:
    stock.put("one", [1])
    # What a check found is written down.
    (stock.folder / "near" / "verified").mkdir()

    def there() -> list[Path]:
        found = (stock.folder / "near").rglob("*")
        return sorted(one for one in found if one.parent.name != "verified")

    before = there()
    code, said, _ = stock("verify", "--repair")
    assert (code, "0 damaged objects removed" in said) == (0, True)
    assert there() == before
