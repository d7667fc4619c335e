"""A collection that meets a copy of a snapshot whose keys an earlier copy has left behind."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.stocking import ALICE_KEY, Stock, stocked
from vmckpt.snapshot import copy
from vmckpt.snapshot.catalog import references
from vmckpt.store import fault_injection, gc
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.repository import Store
from vmckpt.units import Seconds

GRACE = Seconds(0.3)


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    made = stocked(tmp_path, monkeypatch, capsys)
    made.ring.add_admin("alice", ALICE_KEY)
    return made


def condemned(stock: Stock) -> tuple[str, Store, Store]:
    """A snapshot, where it is, and a store that has its wrapped keys alone, which are condemned."""
    id_ = stock.put("one", [1, 2, 3, 4, 5])
    near, far = stock.store("near"), stock.store("far")
    wraps = near.wraps(id_)
    assert wraps is not None
    far.put_wraps(id_, wraps)
    time.sleep(1.5 * GRACE)
    assert gc.collect(far, references, grace=GRACE).condemned == 1
    time.sleep(1.5 * GRACE)
    return id_, near, far


@contextmanager
def once(point: str, work: Callable[[], object]) -> Iterator[list[object]]:
    """Do that when the point is passed for the first time."""
    done: list[object] = []

    def at(passed: str) -> None:
        if passed == point and not done:
            done.append(None)
            done[0] = work()

    fault_injection.listen(at)
    try:
        yield done
        assert done
    finally:
        fault_injection.listen(None)


def assert_opens(stock: Stock, id_: str, far: Store) -> None:
    assert [one.id for one in far.manifests()] == [id_]
    assert far.wraps(id_) == stock.store("near").wraps(id_)
    assert stock("verify", id_, "--store", "far")[0] == 0


@pytest.mark.parametrize("point", ["publish: checked", "publish: wraps", "publish: manifest"])
def test_a_collection_in_the_middle_of_a_copy_takes_no_keys(stock: Stock, point: str) -> None:
    id_, near, far = condemned(stock)
    with once(point, lambda: gc.collect(far, references, grace=GRACE)):
        copy.copy(near, far, id_)
    assert_opens(stock, id_, far)


@pytest.mark.parametrize("point", ["gc: decided", "gc: to be looked for again"])
def test_a_copy_in_the_middle_of_a_collection_keeps_its_keys(stock: Stock, point: str) -> None:
    id_, near, far = condemned(stock)
    with once(point, lambda: copy.copy(near, far, id_)):
        gc.collect(far, references, grace=GRACE)
    assert_opens(stock, id_, far)


def test_keys_of_a_snapshot_that_was_copied_meanwhile_are_there_all_the_time(
    stock: Stock,
) -> None:
    """A reader must not miss them, and a collection that dies must not have taken them."""
    id_, near, far = condemned(stock)
    with (
        once("gc: decided", lambda: copy.copy(near, far, id_)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(LocalFolder, "delete", undeletable(f"wraps/{id_}"))
        gc.collect(far, references, grace=GRACE)
    assert_opens(stock, id_, far)


def undeletable(which: str) -> Callable[[LocalFolder, str], None]:
    """Deletes anything else."""
    delete = LocalFolder.delete

    def checked(folder: LocalFolder, key: str) -> None:
        assert key != which
        delete(folder, key)

    return checked


def test_keys_are_put_back_for_a_copy_that_died_once_its_snapshot_was_published(
    stock: Stock,
) -> None:
    """It had seen them before it died, and a collection took them in between."""
    id_, near, far = condemned(stock)

    def publish() -> None:
        far.backend.put(f"snapshots/{id_}", near.manifest(id_))

    with once("gc: to be looked for again", publish):
        gc.collect(far, references, grace=GRACE)
    assert far.wraps(id_) == near.wraps(id_)


def test_keys_that_nobody_needs_go(stock: Stock) -> None:
    id_, _, far = condemned(stock)
    assert gc.collect(far, references, grace=GRACE).removed == 1
    assert far.wraps(id_) is None


def test_pins_and_verdicts_of_no_snapshot_go_as_well(stock: Stock) -> None:
    far = stock.store("far")
    keys = ("pins/s-2m7abcdefghijkm", "verified/s-2m7abcdefghijkm")
    for key in keys:
        far.backend.put(key, b"left")
    time.sleep(1.5 * GRACE)
    gc.collect(far, references, grace=GRACE)
    time.sleep(1.5 * GRACE)
    gc.collect(far, references, grace=GRACE)
    assert [one.key for prefix in ("pins/", "verified/") for one in far.backend.keys(prefix)] == []
