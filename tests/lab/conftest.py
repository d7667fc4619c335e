import os
from collections.abc import Iterator

import pytest

from tests.lab.bench import Bench, traces
from vmckpt_lab import guests, lab, pace

# No test waits for a few milliseconds, and guests at the full pace leave no core to the tests.
os.environ.setdefault(pace.PACE, "0.25")

LONGEST = (
    "test_migrate", "test_snapshots", "test_qemu_user", "test_evacuate_off", "test_ways",
    "test_locking", "test_replication", "test_matrix", "test_blockers", "test_control",
    "test_evacuate", "test_replication_trouble", "test_replication_trial", "test_groups",
)  # fmt: skip
"""Files that take minutes. They come first: with one of them as the last, two of three processes
would wait for the third."""


@pytest.fixture(scope="session")
def session_lab() -> Iterator[Bench]:
    """A lab for the whole session, under a name that no other run has."""
    name = f"t{os.getpid()}"
    plan = lab.up(name, hosts=2)
    yield Bench(plan)
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.fixture
def bench(session_lab: Bench) -> Iterator[Bench]:
    """The session's lab; afterwards its hosts are healed and its guests gone."""
    yield session_lab
    for host in session_lab.plan.hosts:
        lab.heal(session_lab.plan, host.name)
    for guest in guests.stored(session_lab.plan):
        guests.remove(session_lab.plan, guest.name)


@pytest.fixture
def kept(bench: Bench) -> Iterator[Bench]:
    """A lab with a store. Tests of several files share the lab, so images of forks are removed."""
    bench.good("snapshot", "init")
    yield bench
    for image in bench.plan.shared.glob("fork-*"):
        image.unlink()
    folder = bench.plan.shared / "snapshots"
    bench.inside("alpha", "rm", "-rf", str(folder))
    for one in bench.plan.hosts:
        bench.inside(one.name, "rm", "-rf", str(one.root / "agent"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/lab/" in item.nodeid:
            item.add_marker(pytest.mark.lab)
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else 99)
