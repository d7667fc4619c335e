"""What is PostgreSQL's alone: its URL, a server that goes away, and controllers that stop dead."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, text

from tests.support import postgres
from tests.support.recording import sampled, until
from vmckpt.errors import JournalError
from vmckpt.journal import recorder
from vmckpt.journal.postgresql import PostgresDatabase
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta")
SECRET = "geheim7"


@pytest.fixture
def place(postgresql: postgres.Server) -> str:
    return postgresql.place()


@pytest.fixture
def database(place: str) -> Iterator[PostgresDatabase]:
    made = PostgresDatabase(place, busy=Seconds(5.0), read_only=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            f"mysql://u:{SECRET}@h/d",
            "mysql:// URLs are not supported for a journal; use a file, or postg",
        ),
        (
            f"postgresql+psycopg://u:{SECRET}@h/d",
            "postgresql+psycopg:// URLs are not supported for a journal",
        ),
        (f"postgresql://u:x@{SECRET}@h/d", "the journal's URL is invalid; use postgresql"),
        (f"postgresql://u:1/{SECRET}@h/d", "the journal's URL is invalid"),
        (f"postgresql://u:{SECRET}@h:port/d", "the journal's URL is invalid"),
        (f"postgresql://u:{SECRET}@h", "the journal's URL postgresql://u@h/ names no database"),
        (f"postgresql://u:{SECRET}@127.0.0.1:1/d", "journal postgresql://u@127.0.0.1:1/d: "),
        (f"postgresql:///d?host=/nowhere&password={SECRET}", "journal postgresql:///nowhere/d: "),
    ],
)
def test_a_url_that_leads_nowhere_is_told_in_one_line_without_its_password(
    place: str, told: str
) -> None:
    with pytest.raises(JournalError) as caught:
        Journal(place)
    line = str(caught.value)

    assert line.startswith(told)
    assert "\n" not in line
    assert SECRET not in line


def test_what_cannot_be_reached_comes_with_a_way_out() -> None:
    with pytest.raises(
        JournalError, match="check that PostgreSQL is running on the server and accepts this user"
    ):
        Journal("postgresql://u@127.0.0.1:1/d")


def test_a_login_that_is_refused_does_not_repeat_the_password(place: str) -> None:
    with pytest.raises(JournalError) as caught:
        Journal(place.replace("postgres@/", f"nobody-known:{SECRET}@/"))

    assert 'role "nobody-known" does not exist' in str(caught.value)
    assert SECRET not in str(caught.value)


def test_what_is_committed_is_on_disk_whatever_the_servers_default(
    postgresql: postgres.Server,
) -> None:
    place = postgresql.url(synchronous_commit="off", work_mem="7MB")
    database = PostgresDatabase(place, busy=Seconds(5.0), read_only=False)

    def shown(connection: Connection) -> list[str]:
        names = ("synchronous_commit", "work_mem")
        return [connection.execute(text(f"SHOW {name}")).scalar_one() for name in names]

    assert database.write(shown) == ["on", "7MB"]
    database.close()


def test_a_broken_connection_is_replaced_where_nothing_was_committed(
    database: PostgresDatabase,
) -> None:
    database.write(lambda c: c.execute(text("CREATE TABLE t (n int)")))
    calls = []

    def work(connection: Connection) -> int:
        calls.append(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        connection.execute(text("INSERT INTO t VALUES (1)"))
        if len(calls) == 1:
            killing = PostgresDatabase.write
            threading.Thread(
                target=lambda: killing(database, lambda c: c.execute(
                    text("SELECT pg_terminate_backend(:pid)"), {"pid": calls[0]}
                )),
            ).start()  # fmt: skip
            time.sleep(0.3)
            connection.execute(text("SELECT 1"))
        return len(calls)

    assert database.write(work) == 2
    count = database.read(lambda c: c.execute(text("SELECT count(*) FROM t")).scalar_one())
    assert count == 1


def test_a_commit_without_an_answer_is_not_tried_again(
    database: PostgresDatabase, postgresql: postgres.Server
) -> None:
    """The server is killed by the commit itself: a trigger that runs at its end sleeps."""
    database.write(lambda c: [c.execute(text(one)) for one in (
        "CREATE TABLE t (n int)",
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END'",
        "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON t INITIALLY DEFERRED FOR EACH ROW"
        " EXECUTE FUNCTION slow()",
    )])  # fmt: skip
    calls: list[int] = []

    def work(connection: Connection) -> None:
        calls.append(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        connection.execute(text("INSERT INTO t VALUES (1)"))
        kill = f"SELECT pg_terminate_backend({calls[0]})"
        threading.Timer(0.5, lambda: postgresql.sql(kill)).start()

    with pytest.raises(JournalError, match="the last record may or may not have been saved"):
        database.write(work)
    assert len(calls) == 1


def test_two_that_wait_for_each_other_are_told_apart_by_trying_again(
    database: PostgresDatabase,
) -> None:
    database.write(
        lambda c: c.execute(text("CREATE TABLE t AS SELECT n FROM (VALUES (1), (2)) AS v (n)"))
    )
    both = threading.Barrier(2)
    calls: list[int] = []

    def crossing(first: int, second: int) -> None:
        turn: list[int] = []

        def work(connection: Connection) -> None:
            turn.append(1)
            calls.append(1)
            lock = text("SELECT n FROM t WHERE n = :n FOR UPDATE")
            connection.execute(lock, {"n": first})
            if len(turn) == 1:
                both.wait(10)
            connection.execute(lock, {"n": second})

        database.write(work)

    threads = [threading.Thread(target=crossing, args=one) for one in ((1, 2), (2, 1))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)

    assert len(calls) == 3


STOPPED = """
import os, signal, sys
from vmckpt.journal import transactions
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal

journal = Journal(sys.argv[1])
id_ = sys.argv[2]
def work(connection):
    transactions.guard(connection, id_)
    print("locked", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
journal._database.write(work)
"""


def test_a_controller_that_is_stopped_in_a_transaction_does_not_keep_rows_locked(
    place: str,
) -> None:
    quick = place + "%20-c%20idle_in_transaction_session_timeout%3D1s"
    with Journal(place) as journal:
        id_ = journal.begin(WEB1)
        stopped = subprocess.Popen(
            [sys.executable, "-c", STOPPED, quick, id_], stdout=subprocess.PIPE, text=True
        )
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "locked\n"
        journal.acquire(id_, "guest/u-1")
        os.kill(stopped.pid, signal.SIGKILL)
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.communicate()

        assert journal.operation(id_).active


@pytest.fixture
def fragile() -> Iterator[postgres.Server]:
    """A server that may be stopped."""
    server = postgres.Server()
    yield server
    server.remove()


class Mover(threading.Thread):
    """Goes on with steps and samples, whatever the journal says."""

    def __init__(self, recording: Recorder) -> None:
        super().__init__()
        self.intended: list[int] = []
        self.failed: list[str] = []
        self.enough = threading.Event()
        self._recording = recording

    def run(self) -> None:
        while not self.enough.wait(0.02):
            self._recording.take(sampled(time.monotonic()))
            try:
                step = self._recording.intend("set-limits", {"turn": len(self.intended)})
                self.intended.append(step)
                self._recording.conclude(step, StepState.DONE, {})
            except JournalError as exc:
                self.failed.append(str(exc))


@pytest.mark.parametrize("away", [0.0, 4.0])
def test_a_server_that_crashes_and_comes_back_has_all_that_was_intended(
    fragile: postgres.Server, away: float
) -> None:
    warnings: list[str] = []
    place = fragile.place()
    made = recorder.begin(WEB1, warnings.append, place)
    assert made.id is not None
    made.acquire("guest/u-1")
    mover = Mover(made)
    mover.start()
    until(lambda: len(mover.intended) > 5)
    fragile.stop(signal.SIGQUIT)
    before = len(mover.intended)
    time.sleep(away)
    fragile.start()
    until(lambda: len(mover.intended) > before + 5, limit=20.0)
    mover.enough.set()
    mover.join()
    made.check()
    made.finish("completed", None)
    made.close()

    with Journal(place, read_only=True) as journal:
        assert set(mover.intended) <= {one.seq for one in journal.steps(made.id)}
        assert journal.operation(made.id).outcome == "completed"
        assert len(journal.samples(made.id)) >= len(mover.intended)
    assert len(warnings) <= 1
    if away > 3:  # longer than is waited for: whoever wants to act is told
        assert mover.failed
        assert "\n" not in mover.failed[0]
