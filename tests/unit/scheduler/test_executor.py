"""One piece of a service's work in real stores."""

import threading
from pathlib import Path

import pytest

from tests.support.stocking import Stock, flip, stocked
from vmckpt.errors import Cancelled
from vmckpt.policy.model import Check
from vmckpt.scheduler.executor import Did, Executor
from vmckpt.scheduler.jobs import CollectGarbage, CopySnapshot, PruneSnapshots, VerifySnapshots
from vmckpt.scheduler.store_cache import Shelves
from vmckpt.snapshot.verify import results
from vmckpt.units import show_count


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def executor(stock: Stock) -> Executor:
    shelves = Shelves(stock.store, stock.ring.trusted)
    return Executor(shelves=shelves, keys=stock.ring, identity=None, stop=threading.Event())


def ids(stock: Stock, store: str) -> set[str]:
    return {one.id for one in stock.store(store).manifests()}


def verified(stock: Stock, *which: str, depth: Check = Check.SEALED) -> Did:
    return executor(stock).run(VerifySnapshots(store="near", ids=which, depth=depth))


def test_a_copy_is_whole_in_the_other_store_and_told_with_its_size(stock: Stock) -> None:
    one = stock.put("one", [1, 2])
    work = CopySnapshot(id=one, name="web1", source="near", target="far")
    did = executor(stock).run(work)

    assert ids(stock, "far") == {one}
    assert did.text.startswith(f"copied {one} of web1 to far: ")
    assert (did.values["store"], did.values["from"]) == ("far", "near")
    assert executor(stock).run(work).text.endswith(": 0 B new")


def test_what_is_pruned_goes_and_what_is_pinned_or_gone_is_passed_over(stock: Stock) -> None:
    old, pinned, kept = (stock.put(name, [1]) for name in ("old", "pinned", "kept"))
    stock.store().pin(pinned)
    which = (old, "gone", pinned)
    work = PruneSnapshots(store="near", ids=which, schedule="often", name="web1")
    did = executor(stock).run(work)

    assert ids(stock, "near") == {pinned, kept}
    assert did.values["deleted"] == [old]
    assert did.text == "pruned web1 (often) in near: 1 deleted"


def test_good_snapshots_are_verified_and_that_is_written_down(stock: Stock) -> None:
    one = stock.put("one", [1, 2])
    did = verified(stock, one, "gone", depth=Check.DEEP)

    assert did.good
    assert did.text == "verified 1 snapshot in near (deep): all intact"
    assert [key.key for key in stock.store().backend.keys(results.PREFIX)] == [
        f"{results.PREFIX}{one}"
    ]


def test_damage_is_told_and_is_not_good(stock: Stock) -> None:
    one = stock.put("one", [1, 2])
    (pack,) = stock.packs()
    flip(pack, 60)
    did = verified(stock, one)

    assert not did.good
    assert did.text.startswith("verified 1 snapshot in near (sealed): packs/")


def test_of_snapshots_that_are_all_gone_nothing_else_is_verified(stock: Stock) -> None:
    stock.put("one", [1])
    assert verified(stock, "gone").text == "nothing to verify in near"
    assert list(stock.store().backend.keys(results.PREFIX)) == []


def test_missing_chunks_are_told_by_a_collection(stock: Stock) -> None:
    stock.put("one", [1, 2])
    assert executor(stock).run(CollectGarbage(store="near")).good
    stock.packs()[0].unlink()
    did = executor(stock).run(CollectGarbage(store="near"))

    assert not did.good
    assert did.values["missing_chunks"] > 0
    assert f"; {show_count(did.values['missing_chunks'], 'missing chunk')}, " in did.text


def test_work_that_is_stopped_ends_before_it_changes_more(stock: Stock) -> None:
    one = stock.put("one", [1, 2])
    working = executor(stock)
    working.stop.set()
    for work in (
        CopySnapshot(id=one, name="web1", source="near", target="far"),
        PruneSnapshots(store="near", ids=(one,), schedule="often", name="web1"),
    ):
        with pytest.raises(Cancelled):
            working.run(work)

    assert (ids(stock, "near"), ids(stock, "far")) == ({one}, set())
