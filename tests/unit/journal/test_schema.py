"""Journals that an older vmckpt wrote, and several that migrate or make one at once."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from tests.support import postgres
from tests.support.journals import WEB1
from tests.support.paths import FIXTURES
from vmckpt.errors import JournalError
from vmckpt.journal import schema
from vmckpt.journal.records import StepState
from vmckpt.journal.store import Journal

VERSIONS = (1, 2)
"""Schema versions of which tests/fixtures has a journal."""
TABLES = ("operations", "events", "samples", "forecasts", "requests")
OPENER = """
import sys
from vmckpt.journal.store import Journal
print("ready", flush=True)
sys.stdin.readline()
with Journal(sys.argv[1]) as journal:
    print(len(journal.operations()))
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A journal of version 1, as it was left."""
    return left(tmp_path, 1)


def left(folder: Path, version: int) -> Path:
    """A journal of that version, as it was left."""
    path = folder / "journal.db"
    with sqlite3.connect(path) as raw:
        raw.executescript((FIXTURES / f"journal_v{version}.sql").read_text())
        raw.execute("PRAGMA journal_mode=WAL")
    raw.close()
    return path


def content(path: Path) -> dict[str, list[dict[str, object]]]:
    with sqlite3.connect(path) as raw:
        raw.row_factory = sqlite3.Row
        found = {
            name: [dict(row) for row in raw.execute(f"SELECT * FROM {name} ORDER BY 1, 2")]
            for name in TABLES
        }
    raw.close()
    return found


def all_at_once(place: Path | str, count: int = 3) -> list[str]:
    """What processes say that open a journal at the same time."""
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER, str(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    for one in openers:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in openers:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    return [one.communicate(timeout=60)[0] for one in openers]


def test_a_journal_of_version_1_is_migrated_with_all_that_is_in_it(old: Path) -> None:
    before = content(old)
    with Journal(old) as journal:
        ended, waiting = journal.operation("m-aaaa"), journal.operation("m-bbbb")
        assert (ended.outcome, ended.report) == (
            "completed",
            {
                "total_ms": 4200.5,
                "passes": [{"bandwidth": 100, "lasted_ms": 3000}],
                "warnings": [],
            },
        )
        assert [one.values["done"] for one in journal.samples("m-aaaa")] == [0.0, 0.1, 0.2, 0.3]
        assert journal.events("m-aaaa")[0].values["reason"] == "it’s late"
        assert [(one.kind, one.answered_at) for one in journal.requests("m-bbbb")] == [
            ("cancel", None)
        ]
        assert (waiting.alive_until, journal.steps("m-bbbb")) == (None, [])
        assert waiting not in journal.abandoned()  # on another machine, and it never gave its word
        assert journal.prune() is not None
    after = content(old)
    for row in after["operations"]:
        assert row.pop("alive_until") is None

    # What is there a year later is not this test's matter: prune forgets what ended long ago.
    assert len(before["operations"]) == 3
    kept = [row["id"] for row in after["operations"]]
    assert kept == ["m-bbbb", "r-cccc"]


def test_migrating_changes_no_row(old: Path) -> None:
    before = content(old)
    Journal(old).close()
    after = content(old)
    for row in after["operations"]:
        assert row.pop("alive_until") is None

    assert json.dumps(after) == json.dumps(before)


def test_a_migrated_journal_can_all_that_a_new_one_can(old: Path) -> None:
    with Journal(old) as journal:
        fence = journal.acquire("r-cccc", "guest/u-1")
        step = journal.intend("r-cccc", "move", {}, fence)
        journal.conclude("r-cccc", step, StepState.DONE, {}, fence)
        journal.finish("r-cccc", "completed", None)

        assert (fence.token, len(journal.steps("r-cccc"))) == (1, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_migrated_journal_has_the_tables_of_a_new_one(version: int, tmp_path: Path) -> None:
    old, new = left(tmp_path, version), tmp_path / "new.db"

    def tables(path: Path) -> object:
        Journal(path).close()
        engine = create_engine(f"sqlite:///{path}")
        found = inspect(engine)
        told = {
            name: (
                {(one["name"], str(one["type"]), one["nullable"]) for one in columns},
                found.get_pk_constraint(name)["constrained_columns"],
                sorted((tuple(key["constrained_columns"]), str(key["options"])) for key in keys),
                sorted(str(one["name"]) for one in found.get_indexes(name)),
            )
            for name in found.get_table_names()
            for columns, keys in [(found.get_columns(name), found.get_foreign_keys(name))]
        }
        engine.dispose()
        return told

    assert tables(old) == tables(new)


def test_a_journal_of_version_2_gets_an_audit_trail_and_keeps_its_steps_and_leases(
    tmp_path: Path,
) -> None:
    old = left(tmp_path, 2)
    before = content(old)
    with Journal(old) as journal:
        assert content(old) == before
        assert (journal.verify_audit().entries, journal.verify_audit().broken) == (0, None)
        assert [one.state for one in journal.steps("s-eeee")] == [StepState.INTENDED]
        holder = journal.holder("guest/u-2")
        assert holder is not None
        assert holder.id == "s-eeee"
        journal.finish("s-eeee", "failed", None)
        (entry,) = journal.audit()
    assert (entry.seq, entry.fact.deed.job, entry.fact.deed.what) == (1, "s-eeee", "ended")


def test_a_journal_of_version_2_on_a_server_gets_an_audit_trail(
    postgresql: postgres.Server,
) -> None:
    place = postgresql.place()
    Journal(place).close()
    schema_name = place.rpartition("%3D")[2]
    for statement in (
        "DROP TABLE audit", "DELETE FROM meta WHERE key = 'audit_head'",
        "UPDATE meta SET value = '2' WHERE key = 'version'",
    ):  # fmt: skip
        postgresql.sql(statement, schema_name)
    with Journal(place) as journal:
        journal.finish(journal.begin(WEB1), "completed", None)
        assert (journal.verify_audit().entries, journal.verify_audit().broken) == (2, None)


def test_several_that_migrate_at_once_do_it_once(old: Path) -> None:
    assert all_at_once(old) == ["3\n"] * 3
    with sqlite3.connect(old) as raw:
        assert raw.execute("SELECT value FROM meta WHERE key = 'version'").fetchone() == ("3",)
    raw.close()


def test_several_that_make_the_tables_at_once_make_them_once(place: Path | str) -> None:
    assert all_at_once(place) == ["0\n"] * 3


def test_a_newer_journal_on_a_server_is_refused_by_its_name(postgresql: postgres.Server) -> None:
    place = postgresql.place()
    Journal(place).close()
    schema_name = place.rpartition("%3D")[2]
    postgresql.sql("UPDATE meta SET value = '9' WHERE key = 'version'", schema_name)

    with pytest.raises(
        JournalError, match=r"^journal postgresql://.* has schema version 9, .* up to 3"
    ):
        Journal(place)


def test_looking_migrates_nothing(old: Path) -> None:
    with pytest.raises(JournalError, match="has the old schema version 1; run a command that"):
        Journal(old, read_only=True)
    assert 1 + len(schema.MIGRATIONS) == 3
    with sqlite3.connect(old) as raw:
        assert raw.execute("SELECT value FROM meta WHERE key = 'version'").fetchone() == ("1",)
    raw.close()
