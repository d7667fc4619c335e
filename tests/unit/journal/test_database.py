"""The journal's file: its schema, several writers, and writers that die."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from tests.support.paths import ROOT
from vmckpt.errors import JournalError
from vmckpt.journal import controller_identity, schema
from vmckpt.journal.records import NewOperation, Record
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

DOCS = (ROOT / "docs/recovery.md").read_text()
WEB1 = NewOperation(kind="migrate", guest="web1", source="alpha", target="beta")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal(path) as made:
        yield made


def sampled(at: float) -> list[Record]:
    return [Record(kind="sampled", at=Seconds(at), values={"done": 0.5})]


def test_the_journal_is_its_owners_alone(journal: Journal, path: Path) -> None:
    journal.begin(WEB1)
    files = list(path.parent.iterdir())

    assert path in files
    assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711


def test_a_newer_schema_is_refused_in_one_line_and_left_alone(path: Path) -> None:
    Journal(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = '9' WHERE key = 'version'")
    raw.close()

    why = "has schema version 9, but this vmckpt supports versions up to 3"
    with pytest.raises(JournalError, match=why) as caught:
        Journal(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_older_schema_is_migrated_step_by_step(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(path).close()
    done = []

    def fourth(connection: Connection) -> None:
        done.append(4)
        connection.execute(text("ALTER TABLE operations ADD COLUMN colour TEXT"))

    steps = (*schema.MIGRATIONS, fourth, lambda _: done.append(5))
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    Journal(path).close()
    Journal(path).close()

    assert done == [4, 5]
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT value FROM meta WHERE key = 'version'").fetchone() == ("5",)
        raw.execute("SELECT colour FROM operations")
    raw.close()


def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(path).close()

    def half(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE operations ADD COLUMN colour TEXT"))
        connection.execute(text("SELECT 1 FROM nowhere"))

    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, half))
    with pytest.raises(JournalError, match="nowhere"):
        Journal(path)
    monkeypatch.undo()
    with Journal(path) as again:
        again.begin(WEB1)


def test_a_file_that_is_no_journal_is_refused_in_one_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"these are not the tables you are looking for" * 100)

    with pytest.raises(
        JournalError, match="abandons the leases and protections in the journal"
    ) as caught:
        Journal(path)
    assert '"A damaged journal" in docs/recovery.md' in str(caught.value)


def test_what_is_whole_of_a_damaged_journal_is_saved_as_the_docs_say(path: Path) -> None:
    with Journal(path) as journal:
        ids = [journal.begin(WEB1) for _ in range(20)]
        for id_ in ids:
            journal.add_samples(id_, sampled(1.0) * 500)
    with path.open("r+b") as file:  # in the middle of the samples
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(os.urandom(4096))

    def samples() -> list[int]:
        with Journal(path) as journal:
            return [len(journal.samples(id_)) for id_ in ids]

    with pytest.raises(
        JournalError, match=r"malformed; .* abandons the leases and protections in the journal"
    ):
        samples()
    commands = DOCS[DOCS.index("## A damaged journal") :].splitlines()
    rename, save = (line.strip() for line in commands if "journal.db.damaged" in line)
    for command in (rename, save):
        subprocess.run(["sh", "-c", command], cwd=path.parent, check=True, capture_output=True)
    assert sum(samples()) > 500 * len(ids) * 0.9
    with Journal(path) as journal:
        assert {one.id for one in journal.operations(active=True)} == set(ids)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_told_with_a_way_out() -> None:
    with pytest.raises(JournalError, match="VMCKPT_STATE"):
        Journal(Path("/dev/null/state/journal.db"))


def test_many_may_open_a_new_journal_and_write_at_once(path: Path) -> None:
    ids: list[str] = []
    faults: list[Exception] = []

    def work() -> None:
        try:
            with Journal(path, busy=Seconds(20.0)) as mine:
                id_ = mine.begin(WEB1)
                for number in range(10):
                    mine.add_samples(id_, sampled(float(number)))
                    mine.operations()
                ids.append(id_)
        except JournalError as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()

    assert faults == []
    with Journal(path) as journal:
        assert {len(journal.samples(id_)) for id_ in ids} == {10}
        assert len(journal.operations()) == 6


WRITER = """
import sys
import time
from pathlib import Path
from vmckpt.journal.records import NewOperation, Record
from vmckpt.journal.store import Journal

journal = Journal(Path(sys.argv[1]))
id_ = journal.begin(NewOperation(kind="migrate", guest="web2"))
print(id_, flush=True)
while True:
    journal.add_samples(id_, [Record(kind="sampled", at=0.0, values={"n": n}) for n in range(50)])
    print("batch", flush=True)
    time.sleep(0.01)  # SQLite's locks know no queue: one that never pauses keeps others away
"""


def test_a_writer_killed_in_the_middle_leaves_whole_batches_and_shows_as_dead(
    journal: Journal, path: Path
) -> None:
    with ExitStack() as stack:
        writer = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(writer.kill)
        assert writer.stdout is not None
        id_ = writer.stdout.readline().strip()
        for _ in range(5):
            writer.stdout.readline()
            journal.add_samples(journal.begin(WEB1), sampled(0.0))  # two processes write at once
        controller = journal.operation(id_).controller
        assert controller_identity.is_alive(controller) is True
        os.kill(writer.pid, signal.SIGKILL)
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        assert controller_identity.is_alive(controller) is False  # a zombie, until its parent looks

    assert controller_identity.is_alive(controller) is False
    with Journal(path) as again:
        count = len(again.samples(id_))
        assert count >= 250
        assert count % 50 == 0
        again.add_samples(id_, sampled(1.0))
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()


def test_a_second_journal_in_one_process_does_not_cut_the_first_off(tmp_path: Path) -> None:
    """SQLite's locks belong to the process: closing the file in any other way drops them all."""
    path = tmp_path / "journal.db"
    program = (
        "import sys; from pathlib import Path; from vmckpt.journal.store import Journal\n"
        "with Journal(Path(sys.argv[1])) as j:\n"
        "    id_ = j.operations()[0].id\n"
        "    print(len(j.events(id_)))\n"
        "    j.ask(id_, 'cancel', {}, 'anna')\n"
    )
    with Journal(path) as first:
        id_ = first.begin(NewOperation(kind="migrate", guest="web1"))
        Journal(path).close()
        for turn in (1, 2):
            first.add_event(id_, Record(kind="noted", at=Seconds(1.0), values={}))
            done = subprocess.run(
                [sys.executable, "-c", program, str(path)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip

            assert done.stdout == f"{turn}\n"
            assert len(first.take_requests(id_)) == 1
