"""Journals of both kinds: an SQLite file, and a schema on a PostgreSQL server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgres.Server]:
    """A server for all tests; started when the first of them needs it."""
    if not postgres.AVAILABLE:
        pytest.skip("PostgreSQL is not installed; ./check --install does that")
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
