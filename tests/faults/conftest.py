import os
from collections.abc import Iterator

import pytest

from tests.lab.bench import Bench, traces
from vmckpt_lab import guests, lab
from vmckpt_lab.faults import inject
from vmckpt_lab.faults.scenarios import Fault


@pytest.fixture(scope="session")
def shaken_lab() -> Iterator[Bench]:
    """Three hosts for the whole session, under a name that no other run has."""
    yield from made(f"f{os.getpid()}", witness=False)


@pytest.fixture(scope="session")
def witnessed_lab() -> Iterator[Bench]:
    """Another one with PostgreSQL, which takes longer to start."""
    yield from made(f"g{os.getpid()}", witness=True)


def made(name: str, *, witness: bool) -> Iterator[Bench]:
    plan = lab.up(name, hosts=3, with_witness=witness)
    yield Bench(plan)
    lab.down(name)
    assert traces(f"{name}/") + traces(f"{name}.") == []


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The session's lab; afterwards its hosts are mended and its guests gone."""
    call = getattr(request.node, "callspec", None)
    database = call is not None and call.params["cell"].fault is Fault.POSTGRES
    fitting = "witnessed_lab" if database else "shaken_lab"
    bench: Bench = request.getfixturevalue(fitting)
    yield bench
    inject.mend_everything(bench.plan)
    for guest in guests.stored(bench.plan):
        inject.root_out(bench.plan, guest.name)
        guests.remove(bench.plan, guest.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/faults/" in item.nodeid:
            item.add_marker(pytest.mark.lab)
