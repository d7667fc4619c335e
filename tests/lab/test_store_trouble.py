"""A host whose store cannot be written: one clear line, and a guest that has felt nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.bench import WHOLE, Bench
from tests.lab.snapshots import SMALL, ids, left, taken


@contextmanager
def in_its_place(bench: Bench, *mounting: str) -> Iterator[None]:
    """On alpha alone the store is something else."""
    folder = str(bench.plan.shared / "snapshots")
    bench.inside("alpha", "sh", "-ec", "; ".join(mounting), "sh", folder)
    try:
        yield
    finally:
        bench.inside("alpha", "umount", folder)


FULL = (
    "copy=$(mktemp -d)", 'cp -a "$1/." "$copy"', 'mount -t tmpfs -o size=8m store "$1"',
    'cp -a "$copy/." "$1"', 'rm -r "$copy"',
)  # fmt: skip
READ_ONLY = ('mount --bind "$1" "$1"', 'mount -o remount,ro,bind "$1"')


@pytest.mark.long
@pytest.mark.parametrize(
    ("mounting", "code", "words"),
    [(FULL, 44, "no space left"), (READ_ONLY, 40, "read-only file system")],
    ids=["full", "read-only"],
)
def test_a_store_that_takes_nothing(
    kept: Bench, mounting: tuple[str, ...], code: int, words: str
) -> None:
    kept.guest(**SMALL)
    with in_its_place(kept, *mounting):
        done = kept.run("snapshot", "create", "web1")
    line = done.err.strip().splitlines()[-1]
    assert (done.code, words in line) == (code, True), done.err
    assert str(kept.plan.shared / "snapshots") in line
    assert (ids(kept), left(kept)) == ([], [])
    assert kept.ledgers() == WHOLE
    taken(kept)
