"""Finding changed pages: exact, and without filling the guest's holes."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vmckpt.capture.memory.page_diff import Mapping, bring_up, runs
from vmckpt.capture.qemu_stream.header import PAGE

COUNT = 400


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def mapping(path: Path, pages: dict[int, int], *, write: bool = False) -> Mapping:
    """A sparse file with pages of one byte each."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(file, COUNT * PAGE)
    for number, filling in pages.items():
        os.pwrite(file, bytes([filling]) * PAGE, number * PAGE)
    made = Mapping(file, COUNT * PAGE, write=write)
    os.close(file)
    return made


PAGES = st.dictionaries(st.integers(0, COUNT - 1), st.integers(0, 3), max_size=60)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(live=PAGES, last=PAGES, dense=st.booleans(), warm=st.booleans())
def test_the_last_copy_becomes_equal_and_every_change_is_told(
    tmp_path: Path, pool: ThreadPoolExecutor, live: dict[int, int], last: dict[int, int],
    dense: bool, warm: bool,
) -> None:  # fmt: skip
    if dense:
        live = dict.fromkeys(range(COUNT), 1) | live
        last = dict.fromkeys(range(COUNT), 1) | last
    with (
        mapping(tmp_path / "live", live) as a,
        mapping(tmp_path / "last", last, write=True) as b,
    ):
        changed = bring_up(a, b, pool, expected=a.held() if warm else None)
        expected = {n for n in range(COUNT) if live.get(n, 0) != last.get(n, 0)}

        assert set(np.flatnonzero(changed).tolist()) == expected
        assert (tmp_path / "last").read_bytes() == (tmp_path / "live").read_bytes()
        assert not bring_up(a, b, pool).any()


def test_a_change_of_one_byte_is_found(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    same = dict.fromkeys(range(COUNT), 7)
    with mapping(tmp_path / "a", same) as a, mapping(tmp_path / "b", same, write=True) as b:
        with (tmp_path / "a").open("r+b") as file:
            file.seek(123 * PAGE + 4095)
            file.write(b"\0")

        assert np.flatnonzero(bring_up(a, b, pool)).tolist() == [123]


LARGE = 2 * 2048 + 70
"""Pages: two pieces of a thread's work, and a third one that is no whole number of stretches."""
EDGES = (0, 1, 62, 63, 64, 65, 2046, 2047, 2048, 2049, 4095, 4096, LARGE - 2, LARGE - 1)
"""Around a stretch of 64 pages, a piece of 2048, and the end."""


@pytest.mark.parametrize("byte", [0, 7, 8, PAGE // 2, PAGE - 1])
def test_a_change_is_found_at_every_edge_of_what_is_compared_at_once(
    tmp_path: Path, pool: ThreadPoolExecutor, byte: int
) -> None:
    """One after the other: a second change in a stretch would have it looked at anyway."""
    content = b"\7" * (LARGE * PAGE)
    with (tmp_path / "a").open("w+b") as one, (tmp_path / "b").open("w+b") as other:
        one.write(content)
        other.write(content)
        one.flush()
        other.flush()
        with (
            Mapping(one.fileno(), len(content)) as live,
            Mapping(other.fileno(), len(content), write=True) as last,
        ):
            for number in EDGES:
                os.pwrite(one.fileno(), b"\1", number * PAGE + byte)
                assert np.flatnonzero(bring_up(live, last, pool)).tolist() == [number]
                assert os.pread(other.fileno(), 1, number * PAGE + byte) == b"\1"
            assert not bring_up(live, last, pool).any()


def test_pages_that_came_or_went_since_they_were_expected(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    expected = np.zeros(COUNT, dtype=np.bool_)
    expected[[5, 9]] = True
    with (
        mapping(tmp_path / "live", {5: 1, 200: 2}) as a,
        mapping(tmp_path / "last", {5: 1, 9: 3, 10: 4}, write=True) as b,
    ):
        assert np.flatnonzero(bring_up(a, b, pool, expected=expected)).tolist() == [9, 10, 200]
        assert (tmp_path / "last").read_bytes() == (tmp_path / "live").read_bytes()


def test_holes_of_the_guest_stay_holes(pool: ThreadPoolExecutor) -> None:
    folder = Path("/dev/shm") / f"vmckpt-test-{os.getpid()}"
    folder.mkdir()
    try:
        with (
            mapping(folder / "live", {5: 1, 200: 2}) as a,
            mapping(folder / "last", {5: 1, 6: 3}, write=True) as b,
        ):
            a.populate(a.held())
            assert np.flatnonzero(bring_up(a, b, pool)).tolist() == [6, 200]
            assert np.flatnonzero(a.held()).tolist() == [5, 200]
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], []), ([0], []), ([1], [(0, 1)]), ([1, 1, 0, 1], [(0, 2), (3, 4)]), ([0, 1, 1], [(1, 3)])],
)
def test_runs(flags: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(np.array(flags, dtype=np.bool_)) == expected


def test_memory_of_another_size_is_not_compared(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with mapping(tmp_path / "a", {}) as a, mapping(tmp_path / "b", {}, write=True) as b:
        b.size = PAGE
        message = f"cannot compare {COUNT * PAGE} bytes of memory with 4096 bytes"
        with pytest.raises(ValueError, match=message):
            bring_up(a, b, pool)
