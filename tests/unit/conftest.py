"""Journals of both kinds, in SQLite and in PostgreSQL, and S3 servers of both kinds."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import bucket, postgres

LONGEST = ("test_shell_files", "test_mirror_job", "test_bundle")
"""Files of few tests that take a minute or more. They come first, so that none of them is the last;
the others by their number of tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Counter(item.path for item in items)

    def order(item: pytest.Item) -> tuple[int, int]:
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), -tests[item.path]

    items.sort(key=order)


@pytest.fixture(scope="session")
def state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory for tests that do not choose their own."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def no_state_of_this_machine(state_of_tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the journal and the keys of this machine."""
    monkeypatch.setenv("VMCKPT_STATE", str(state_of_tests))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgres.Server]:
    """A server for all tests; started when the first of them needs it."""
    server = postgres.Server()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a new journal may be made, of each kind in turn."""
    if request.param == "sqlite":
        return tmp_path / "state" / "journal.db"
    server: postgres.Server = request.getfixturevalue("postgresql")
    return server.place()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[bucket.Seaweed]:
    """A real S3 server for all tests; started when the first of them needs it."""
    server = bucket.Seaweed()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[bucket.Moto]:
    """A substitute for an S3 server."""
    server = bucket.Moto()
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["moto", "seaweed"])
def s3_server(request: pytest.FixtureRequest) -> bucket.Server:
    """An S3 server of each kind in turn; tests share it, so each takes a bucket of its own."""
    server: bucket.Server = request.getfixturevalue(request.param)
    return server
