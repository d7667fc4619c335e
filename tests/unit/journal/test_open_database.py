"""Which database a location means, and what is opened."""

from contextlib import closing
from pathlib import Path

import pytest

from vmckpt.errors import JournalError
from vmckpt.journal import schema
from vmckpt.journal.open_database import open_database
from vmckpt.journal.postgresql import PostgresDatabase
from vmckpt.journal.sqlite import SqliteDatabase
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

BUSY = Seconds(5.0)


def test_where_no_journal_is_wanted_none_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", "none")

    with pytest.raises(JournalError, match="the journal is turned off"):
        Journal()


def test_what_is_only_read_is_neither_made_nor_given_tables(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.touch()
    with pytest.raises(JournalError, match="has no tables yet; run a command that writes"):
        open_database(path, busy=BUSY, read_only=True)
    assert path.stat().st_size == 0
    with closing(open_database(path, busy=BUSY, read_only=False)) as made:
        assert made.read(schema.version) == 1 + len(schema.MIGRATIONS)
    with closing(open_database(path, busy=BUSY, read_only=True)) as found:
        assert found.read_only
        assert found.read(schema.version) == 1 + len(schema.MIGRATIONS)


def test_each_kind_of_place_is_opened_as_itself(place: Path | str) -> None:
    with closing(open_database(place, busy=BUSY, read_only=False)) as made:
        assert isinstance(made, PostgresDatabase if isinstance(place, str) else SqliteDatabase)
        assert made.read(schema.version) == 1 + len(schema.MIGRATIONS)


def test_a_path_that_is_written_as_text_is_one(tmp_path: Path) -> None:
    open_database(str(tmp_path / "a.db"), busy=BUSY, read_only=False).close()
    assert (tmp_path / "a.db").is_file()
