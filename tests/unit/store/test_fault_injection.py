"""Killed at every point, disturbed at every point: what was published stays whole."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.store_stories import BUSY, STORIES, prepare
from tests.support.storing import (
    SEALING,
    all_keys,
    assert_no_garbage,
    assert_whole,
    chunks,
    gc,
    new_store,
    parsed,
    read,
    write,
)
from vmckpt.errors import BadInput, NotInStore, StoreError
from vmckpt.store import fault_injection
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.locks import Lock, LockPurpose
from vmckpt.store.repository import Store
from vmckpt.units import Seconds


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder whose fsync costs nothing."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="vmckpt-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def before(memory: Path) -> Path:
    prepare(memory / "before")
    return memory / "before"


@pytest.fixture
def folder(memory: Path, before: Path) -> Iterator[Path]:
    yield memory / "s"
    shutil.rmtree(memory / "s", ignore_errors=True)


def fresh(before: Path, folder: Path) -> Store:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)
    (folder / "locks" / "write-dead").unlink()
    return Store.open(LocalFolder(folder))


@pytest.fixture(scope="module")
def children() -> Iterator[Callable[[str, Path, str], int]]:
    """Runs a story in a process of its own that ends at a point; its exit status."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_stories"],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

    def run(story: str, folder: Path, fault: str) -> int:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{story}\t{folder}\t{fault}\n")
        program.stdin.flush()
        return int(program.stdout.readline())

    with program:
        yield run
        assert program.stdin is not None
        program.stdin.close()
        assert program.wait(10) == 0


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    yield
    fault_injection.listen(None)


def passed(story: str, store: Store) -> list[str]:
    """The points that a story passes, each as often as it does."""
    seen: list[str] = []
    fault_injection.listen(seen.append)
    STORIES[story](store)
    fault_injection.listen(None)
    return seen


def moments(points: list[str]) -> list[str]:
    """The same as faults: the first, second, … time."""
    times: Counter[str] = Counter()
    told = []
    for point in points:
        told.append(f"{point}#{times[point]}")
        times[point] += 1
    return told


@pytest.mark.parametrize("story", STORIES)
def test_whatever_is_killed_leaves_what_was_published_whole(
    story: str, before: Path, folder: Path, children: Callable[[str, Path, str], int]
) -> None:
    points = moments(passed(story, fresh(before, folder)))
    assert len(points) > 3
    for point in points:
        store = fresh(before, folder)
        assert children(story, folder, point) == -signal.SIGKILL, point

        assert_whole(store)
        if story != "deleting":
            assert read(store, "kept") == chunks(0, 4, 8, 20, 21)
        assert_no_garbage(store)
        assert_whole(store)
        if story != "writing":
            STORIES["writing"](store)
            assert_whole(store)


def test_processes_write_and_delete_while_others_collect(
    before: Path, folder: Path, children: Callable[[str, Path, str], int]
) -> None:
    store = fresh(before, folder)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(children, "busy", folder, "none")
        collected = [gc(store)]
        while not ended.done():
            collected.append(gc(store))
        assert ended.result() == 0
    collected += [gc(store), gc(store)]
    assert len(store.manifests()) == 1 + 3 * BUSY
    assert sum(one.removed for one in collected) > 3
    assert sum(one.rewritten for one in collected) > 3
    assert_whole(store)
    assert_no_garbage(store)
    assert_whole(store)


def test_every_point_is_passed_by_some_story(before: Path, folder: Path) -> None:
    seen = set()
    for story in STORIES:
        store = fresh(before, folder)
        write(store, "other", chunks(70))
        store.backend.put("locks/write-dead", b"nonsense")
        seen |= set(passed(story, store))

    assert set(fault_injection.POINTS) - seen == set()
    assert seen - set(fault_injection.POINTS) == set()


ALIKE = ("local: temporary made", "local: written", "local: synced")
"""To others the store looks the same at these as before."""


def disturbances(story: str, store: Store) -> int:
    return sum(point not in ALIKE for point in passed(story, store))


def disturbed(store: Store, story: str, moment: int, by: Callable[[], None]) -> None:
    """Run a story with something else happening at one of the points that it passes."""
    interrupted(lambda: STORIES[story](store), moment, by)


def interrupted(work: Callable[[], None], moment: int, by: Callable[[], None]) -> None:
    left = [moment]

    def listener(point: str) -> None:
        left[0] -= point not in ALIKE
        if left[0] == -1 and point not in ALIKE:
            fault_injection.listen(None)
            by()

    fault_injection.listen(listener)
    work()
    fault_injection.listen(None)


@pytest.mark.parametrize("story", ["writing", "deleting", "pinning", "twice"])
def test_collections_at_any_moment_of_other_work_take_nothing_it_needs(
    story: str, before: Path, folder: Path
) -> None:
    def collect() -> None:
        other = Store.open(LocalFolder(folder))
        for _ in range(3):
            gc(other)

    for moment in range(disturbances(story, fresh(before, folder))):
        store = fresh(before, folder)
        disturbed(store, story, moment, collect)
        assert_whole(store)
        collect()
        assert_no_garbage(store)
        assert_whole(store)


@pytest.mark.parametrize("other", ["writing", "deleting", "twice"])
def test_other_work_at_any_moment_of_a_collection_loses_nothing(
    other: str, before: Path, folder: Path
) -> None:
    for moment in range(disturbances("collecting", fresh(before, folder))):
        store = fresh(before, folder)
        beside = Store.open(LocalFolder(folder))
        disturbed(store, "collecting", moment, lambda: STORIES[other](beside))  # noqa: B023
        assert_whole(store)
        assert_no_garbage(store)
        assert_whole(store)


def test_a_writer_that_was_taken_for_dead_publishes_nothing(before: Path, folder: Path) -> None:
    """It stood still, was taken for dead, what it counted on was removed, and it goes on."""

    def collect() -> None:
        other = Store.open(LocalFolder(folder))
        for _ in range(3):
            gc(other, life=0.0)

    refused = 0
    for moment in range(disturbances("writing", fresh(before, folder))):
        store = fresh(before, folder)
        try:
            disturbed(store, "writing", moment, collect)
        except StoreError:
            refused += 1
            assert [one.id for one in store.manifests()] == ["kept"]
        assert_whole(store)
        assert_no_garbage(store)
        assert_whole(store)
    assert refused > 5


def test_a_writer_that_wakes_while_a_collection_looks_publishes_nothing(tmp_path: Path) -> None:
    """Its lock is removed before manifests are read: it cannot write it anew after that."""
    store = new_store(tmp_path / "s")
    write(store, "old", [b"a" * 4096])
    store.delete("old")
    late: list[Exception] = []
    with store.writer(SEALING, beat=Seconds(3600.0)) as writer:
        writer.add(b"a" * 4096).result()
        gc(store)
        made = time.time() - 1000
        os.utime(tmp_path / "s" / writer.lock.key, (made, made))

        def listener(passed: str) -> None:
            if passed == "gc: decided":
                fault_injection.listen(None)
                try:
                    writer.finish()
                    store.publish("new", bytes(32), None, writer=writer)
                except StoreError as exc:
                    late.append(exc)

        fault_injection.listen(listener)
        gc(store, life=900.0)
    assert "did not refresh the lock" in str(late)
    assert store.manifests() == []


@pytest.mark.parametrize("point", ["gc: decided", "gc: object deleted", "gc: rewritten"])
def test_a_collection_that_was_taken_for_dead_removes_nothing_more(
    point: str, before: Path, folder: Path
) -> None:
    store = fresh(before, folder)
    left: list[set[str]] = []

    def listener(passed: str) -> None:
        if passed == point:
            fault_injection.listen(None)
            store.backend.delete("locks/gc")
            assert Lock(store.backend, LockPurpose.GC).take()
            left.append(set(all_keys(store.backend)))

    fault_injection.listen(listener)
    with pytest.raises(StoreError, match="locks/gc expired: this process did not refresh"):
        gc(store)
    assert set(all_keys(store.backend)) == left[0]
    assert_whole(store)
    assert_no_garbage(store)


@pytest.mark.parametrize("first", ["pinning", "deleting"])
def test_what_was_pinned_with_success_is_not_deleted(
    first: str, before: Path, folder: Path
) -> None:
    """One of the two begins anywhere in the other one."""

    def pin() -> None:
        with suppress(NotInStore):
            store.pin("kept")
            done.append("pin")

    def delete() -> None:
        with suppress(BadInput):
            store.delete("kept")
            done.append("delete")

    one, other = (pin, delete) if first == "pinning" else (delete, pin)
    seen = set()
    for moment in range(12):
        store, done = fresh(before, folder), list[str]()
        interrupted(one, moment, other)
        assert len(done) < 2
        assert ("delete" in done) == (store.manifests() == [])
        seen.update(done)
    assert seen == {"pin" if first == "pinning" else "delete"}


def test_two_collections_do_not_run_at_once(before: Path, folder: Path) -> None:
    store = fresh(before, folder)
    refused = []

    def listener(point: str) -> None:
        if point == "gc: decided":
            fault_injection.listen(None)
            with pytest.raises(
                StoreError, match="is already running a garbage collection or repair; wait"
            ) as caught:
                gc(Store.open(LocalFolder(folder)))
            refused.append(caught)

    fault_injection.listen(listener)
    gc(store)
    assert len(refused) == 1


def test_what_was_condemned_and_is_named_again_stays(before: Path, folder: Path) -> None:
    """A writer counts on a pack; while it works the pack is condemned."""
    store = fresh(before, folder)
    gc(store, life=0.0)
    write(store, "gone", chunks(*range(60, 64)))
    store.delete("gone")

    def condemn() -> None:
        assert gc(Store.open(LocalFolder(folder))).condemned > 0
        assert gc(Store.open(LocalFolder(folder))).waiting != ()

    done: list[str] = []

    def listener(point: str) -> None:
        if point == "writer: finished" and not done:
            done.append(point)
            fault_injection.listen(None)
            condemn()

    fault_injection.listen(listener)
    written = write(store, "again", chunks(*range(60, 64)))
    assert written.chunks_new == 0
    gc(store)
    assert read(store, "again") == chunks(*range(60, 64))
    assert parsed(store.manifest("again"))[0] != []
    assert_no_garbage(store)
    assert_whole(store)
