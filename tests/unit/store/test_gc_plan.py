"""What a collection decides, case by case."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.storing import gc, new_store, write
from vmckpt.store.chunk_index import Index, NameSet, PackInfo, Run, names_of
from vmckpt.store.format import pack as format_pack
from vmckpt.store.gc_plan import GcTerms, Loose, PackUse, Scene, dead_locks, decide, use_of
from vmckpt.store.locks import LockPurpose, LockSeen
from vmckpt.store.pending_deletion import PendingDeletion
from vmckpt.units import Bytes, Seconds

NOW = Seconds(100_000.0)
TERMS = GcTerms(grace=Seconds(1000.0), life=Seconds(900.0), small=Bytes(50), few=3)
EMPTY = Scene(packs=(), condemned=(), locks=(), loose=(), leftovers={}, now=NOW)


def ago(seconds: float) -> Seconds:
    return Seconds(NOW - seconds)


def pack(
    letter: str, *, needed: int = 0, age: float = 5000.0, condemned: bool = False, size: int = 100
) -> PackUse:
    id_ = letter * 64
    return PackUse(id_, format_pack.key_of(id_), size, ago(age), 0, needed, condemned)


def condemn(*keys: str, age: float = 5000.0) -> PendingDeletion:
    return PendingDeletion("c", keys, ago(age))


def lock(*knows: str, age: float = 5.0, work: LockPurpose | None = LockPurpose.WRITE) -> LockSeen:
    return LockSeen("locks/w", work, ago(age), frozenset(knows), "", "process 7 on alpha")


A, B = pack("a"), pack("b", condemned=True)


@pytest.mark.parametrize(
    ("scene", "removed", "waits"),
    [
        pytest.param({}, [B.key], "", id="nobody needs it and nobody is at work"),
        pytest.param({"condemned": [condemn(B.key, age=999)]}, [], "999 s ago", id="too young"),
        pytest.param(
            {"locks": [lock()]},
            [],
            "process 7 on alpha was already running when these objects were marked for deletion",
            id="writer",
        ),
        pytest.param({"locks": [lock("x")]}, [], "was already running", id="knows of another one"),
        pytest.param({"locks": [lock("c")]}, [B.key], "", id="a writer that knows"),
        pytest.param(
            {"locks": [lock("c"), lock()]}, [], "was already running", id="one knows, one not"
        ),
        pytest.param({"locks": [lock(age=900)]}, [B.key], "", id="a dead writer"),
        pytest.param({"locks": [lock(age=899)]}, [], "was already running", id="nearly dead"),
        pytest.param(
            {"locks": [lock(work=LockPurpose.DELETE)]}, [B.key], "", id="who deletes only"
        ),
        pytest.param({"locks": [lock(work=LockPurpose.GC)]}, [B.key], "", id="who collects"),
        pytest.param(
            {"locks": [lock(work=None)]}, [], "was already running", id="a lock of nonsense"
        ),
        pytest.param({"packs": [replace(B, needed=1)]}, [], "", id="named again meanwhile"),
        pytest.param({"packs": []}, [], "", id="not readable, or gone already"),
    ],
)
def test_when_the_condemned_go(scene: dict[str, Any], removed: list[str], waits: str) -> None:
    base = replace(EMPTY, packs=[B], condemned=[condemn(B.key)])
    decision = decide(replace(base, **scene), TERMS)

    assert [key for keys in decision.remove.values() for key in keys] == removed
    assert ("c" in decision.remove) != ("c" in decision.waiting)
    assert waits in decision.waiting.get("c", "")
    assert decision.condemn == ()


@pytest.mark.parametrize(
    ("scene", "condemned"),
    [
        pytest.param({"packs": [A]}, [A.key], id="useless"),
        pytest.param({"packs": [A], "locks": [lock()]}, [A.key], id="beside a writer"),
        pytest.param({"packs": [pack("a", age=999)]}, [], id="young: being written, perhaps"),
        pytest.param({"packs": [pack("a", needed=90)]}, [], id="needed"),
        pytest.param(
            {"packs": [B], "condemned": [condemn(B.key, age=1)]}, [], id="condemned already"
        ),
        pytest.param({"loose": [Loose("wraps/x", ago(5000))]}, ["wraps/x"], id="loose"),
        pytest.param({"loose": [Loose("wraps/x", ago(5))]}, [], id="being published, perhaps"),
    ],
)
def test_what_is_condemned(scene: dict[str, Any], condemned: list[str]) -> None:
    assert list(decide(replace(EMPTY, **scene), TERMS).condemn) == condemned


def test_what_was_loose_and_belongs_to_a_snapshot_now_stays() -> None:
    scene = replace(EMPTY, condemned=[condemn("wraps/x", "wraps/y")])
    scene = replace(scene, loose=[Loose("wraps/y", ago(5000))])
    assert decide(scene, TERMS).remove == {"c": ("wraps/y",)}


@pytest.mark.parametrize(
    ("found", "rewritten"),
    [
        pytest.param([pack("a", needed=49)], "a", id="sparse"),
        pytest.param([pack("a", needed=50)], "", id="half"),
        pytest.param([pack("a", needed=49, age=999)], "", id="young"),
        pytest.param([pack("a", needed=49, condemned=True)], "", id="condemned"),
        pytest.param([pack(one, needed=40, size=40) for one in "ab"], "", id="two small ones"),
        pytest.param([pack(one, needed=40, size=40) for one in "abc"], "abc", id="three"),
    ],
)
def test_what_is_rewritten(found: list[PackUse], rewritten: str) -> None:
    told = decide(replace(EMPTY, packs=found), TERMS).rewrite
    assert told == tuple(letter * 64 for letter in rewritten)


def test_a_pack_of_tiny_boxes_is_rewritten_once_and_not_for_ever(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, "one", [b"a", b"b"])
    for _ in range(3):
        told = gc(store, life=0.0)
        assert (told.rewritten, told.condemned) == (0, 0)


def test_the_dead_and_what_they_left() -> None:
    dead, alive = lock(age=901), replace(lock(), key="locks/v")
    own = replace(lock(age=5000, work=LockPurpose.GC), key="locks/gc")
    scene = replace(EMPTY, leftovers={"tmp/a": ago(1000), "tmp/b": ago(999)})
    assert decide(scene, TERMS).clear == ("tmp/a",)
    assert dead_locks([dead, alive, own], scene.now, TERMS) == ("locks/w",)


def run(id_: str, generation: int, *names: int, box: bytes = b"box", foreign: bool = False) -> Run:
    boxes = [(bytes([name]) * 32, box * name, 9) for name in names]
    data = format_pack.encode(boxes, bytes(16), generation)
    rows = format_pack.parse_tail(data, len(data)).rows
    return Run.of([(PackInfo(id_ * 64, generation, len(data), foreign), rows)])


def lie(id_: str, generation: int, *names: int) -> Run:
    return run(id_, generation, *names, box=b"lie", foreign=True)


def given(id_: str, generation: int, *names: int) -> Run:
    return run(id_, generation, *names, foreign=True)


@pytest.mark.parametrize(
    ("runs", "condemned", "homes"),
    [
        pytest.param([run("a", 0, 1, 2)], "", {"a": {1, 2}}, id="one"),
        pytest.param([run("a", 0, 1), run("b", 0, 1, 2)], "", {"b": {1, 2}}, id="the later id"),
        pytest.param([run("b", 0, 1), run("a", 1, 1)], "", {"a": {1}}, id="the later generation"),
        pytest.param([run("b", 0, 1), run("a", 1, 1)], "a", {"b": {1}}, id="not the condemned"),
        pytest.param([run("b", 0, 1), run("a", 1, 1)], "ab", {"a": {1}}, id="both condemned"),
        pytest.param([run("a", 0, 7)], "", {}, id="not needed"),
        pytest.param([run("a", 0, 1, 7, 2), run("b", 0, 3)], "", {"a": {1, 2}, "b": {3}}, id="two"),
        pytest.param([run("a", 0, 1), lie("b", 9, 1)], "", {"a": {1}}, id="our own settles it"),
        pytest.param(
            [run("a", 0, 1), lie("b", 9, 1)], "a", {"a": {1}, "b": {1}}, id="condemned, it does not"
        ),
        pytest.param([lie("a", 0, 1), given("b", 0, 1)], "", {"a": {1}, "b": {1}}, id="both boxes"),
        pytest.param([given("a", 0, 1), given("b", 0, 1)], "", {"b": {1}}, id="one box twice"),
        pytest.param(
            [lie("c", 0, 1, 2), given("d", 0, 2), given("a", 1, 1), lie("b", 2, 1)],
            "d",
            {"c": {2}, "d": {2}, "a": {1}, "b": {1}},
            id="each of several boxes once",
        ),
    ],
)
def test_every_chunk_has_one_home(
    runs: list[Run], condemned: str, homes: dict[str, set[int]]
) -> None:
    live = NameSet([names_of([bytes([one]) * 32 for one in (1, 2, 3)])])
    use = use_of(Index(runs), frozenset(one * 64 for one in condemned), live)

    told = {id_[0]: {name.tobytes()[0] for name in names} for id_, names in use.homes.items()}
    assert told == homes
    assert {id_[0]: size for id_, size in use.needed.items()} == {
        id_: 88 + sum(60 + 3 * name for name in names) for id_, names in homes.items()
    }
    held = set().union(*homes.values())
    assert {one.tobytes()[0] for one in use.missing} == {1, 2, 3} - held
    assert np.array_equal(live.positions(use.missing) >= 0, np.ones(len(use.missing), dtype=bool))
