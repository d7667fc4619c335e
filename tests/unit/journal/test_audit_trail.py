"""The audit trail in a journal of either kind: what is appended, and which edits are found."""

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from tests.support import postgres
from tests.support.journals import WEB1, Clock
from vmckpt.errors import BadInput, LeaseLost
from vmckpt.journal import audit_trail, controller_identity
from vmckpt.journal.audit_chain import START, Deed, Verified
from vmckpt.journal.records import RequestKind, StepState
from vmckpt.journal.store import Journal
from vmckpt.model.roles import ActingUser
from vmckpt.util import acting_user
from vmckpt_lab.machine_speed import Deadline

WRITER = """
import sys
from tests.support.journals import WEB1
from vmckpt.journal.store import Journal
with Journal(sys.argv[1]) as journal:
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(10):
        journal.finish(journal.begin(WEB1), "completed", None)
"""
Edit = Callable[..., None]


@pytest.fixture
def edit(place: Path | str) -> Iterator[Edit]:
    """Runs SQL in the journal, as any user with write access can."""
    if isinstance(place, Path):
        engine: Engine = create_engine(f"sqlite:///{place}")
    else:
        engine = create_engine(place.replace("postgresql://", "postgresql+psycopg://"))

    def run(*statements: str) -> None:
        with engine.begin() as connection:
            for one in statements:
                connection.execute(text(one))

    yield run
    engine.dispose()


def moved(journal: Journal) -> str:
    """A migration with one step, of four entries."""
    id_ = journal.begin(WEB1)
    step = journal.intend(id_, "migrate", {}, None)
    journal.conclude(id_, step, StepState.DONE, {}, None)
    journal.finish(id_, "completed", None)
    return id_


def broken(journal: Journal, head: str | None = None) -> tuple[int, str]:
    found = journal.verify_audit(head).broken
    assert found is not None
    return found.seq, found.why


def test_an_operation_is_in_the_trail_from_its_beginning_to_its_end(
    journal: Journal, clock: Clock
) -> None:
    id_ = moved(journal)
    trail = journal.audit()
    deeds = [one.fact.deed for one in trail]
    assert [(one.what, one.step, one.outcome) for one in deeds] == [
        ("began", None, None), ("intended", "migrate", None), ("concluded", "migrate", "done"),
        ("ended", None, "completed"),
    ]  # fmt: skip
    assert {(one.job, one.kind, one.guest, one.source, one.target) for one in deeds} == {
        (id_, "migrate", "web1", "alpha", "beta")
    }
    assert {one.fact.at_ms for one in trail} == {round(clock.now * 1000)}
    assert {one.fact.actor for one in trail} == {controller_identity.actor()}
    assert journal.verify_audit() == Verified(entries=4, head=trail[-1].digest, broken=None)


def test_an_end_is_in_the_trail_once_and_a_step_that_stays_open_is_not(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    step = journal.intend(id_, "migrate", {}, None)
    journal.conclude(id_, step, StepState.INTENDED, {"half": 1}, None)
    journal.finish(id_, "completed", None)
    journal.finish(id_, "failed", None)
    assert [one.fact.deed.what for one in journal.audit()] == ["began", "intended", "ended"]


def test_a_request_and_a_takeover_are_in_the_trail(journal: Journal, clock: Clock) -> None:
    id_ = journal.begin(WEB1)
    journal.ask(id_, RequestKind.CANCEL, {}, "eve@desk")
    journal.leave(id_)
    journal.take_over(journal.operation(id_))
    deeds = [one.fact.deed for one in journal.audit()]
    assert [(one.what, one.step) for one in deeds] == [
        ("began", None), ("requested", "cancel"), ("taken-over", None),
    ]  # fmt: skip


def test_what_fails_leaves_no_entry(journal: Journal) -> None:
    id_ = moved(journal)
    with pytest.raises(LeaseLost):
        journal.intend(id_, "more", {}, None)
    with pytest.raises(BadInput):
        journal.ask(id_, RequestKind.CANCEL, {}, "eve@desk")
    assert len(journal.audit()) == 4


def test_the_actor_is_the_real_user_and_sudo_only_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    ann = ActingUser(name="ann", groups=frozenset())
    monkeypatch.setattr(acting_user, "acting_user", lambda: ann)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(controller_identity._Program, "command", None)  # restored afterwards
    controller_identity.runs("vmckpt migrate")
    actor = controller_identity.actor()
    assert (actor.uid, actor.user, actor.sudo_user) == (0, pwd.getpwuid(0).pw_name, "ann")
    assert actor.command == "vmckpt migrate"

    monkeypatch.setattr(os, "getuid", lambda: 54321)  # that user acts itself
    actor = controller_identity.actor()
    assert (actor.uid, actor.user, actor.sudo_user) == (54321, "54321", None)


def test_the_trail_is_listed_by_guest_time_and_number(journal: Journal, clock: Clock) -> None:
    moved(journal)
    clock.now += 100
    later = moved(journal)
    assert [one.seq for one in journal.audit(limit=3)] == [6, 7, 8]
    assert {one.fact.deed.job for one in journal.audit(since=clock.now - 50)} == {later}
    assert len(journal.audit(guest="web1")) == 8
    assert journal.audit(guest="web2") == []


@pytest.mark.parametrize(
    ("statements", "seq", "why"),
    [
        (["UPDATE audit SET guest = 'other' WHERE seq = 3"], 3, "the entry was edited"),
        (["UPDATE audit SET uid = 7 WHERE seq = 1"], 1, "the entry was edited"),
        (["DELETE FROM audit WHERE seq = 2"], 3, "entry 2 was removed"),
        (["DELETE FROM audit WHERE seq = 1"], 2, "entry 1 was removed"),
        (["DELETE FROM audit WHERE seq > 2"], 3, "entries 3 to 4 were removed from the end"),
        (["DELETE FROM audit"], 1, "entries 1 to 4 were removed from the end"),
        (
            ["UPDATE audit SET seq = seq + 1 WHERE seq = 4",
             "INSERT INTO audit SELECT 4, at_ms, uid, \"user\", sudo_user, command, host, what,"
             " job, kind, guest, source, target, step, outcome, previous, digest FROM audit"
             " WHERE seq = 3"],
            4, "the entry was edited",
        ),
        (
            ["DELETE FROM meta WHERE key = 'audit_head'"],
            5, "the journal's record of the head is missing or invalid",
        ),
        (
            ["UPDATE meta SET value = '0' WHERE key = 'audit_head'"],
            5, "the journal's record of the head is missing or invalid",
        ),
    ],
)  # fmt: skip
def test_an_edit_of_the_table_is_found(
    journal: Journal, edit: Edit, statements: list[str], seq: int, why: str
) -> None:
    moved(journal)
    edit(*statements)
    assert broken(journal) == (seq, why)


@pytest.mark.parametrize(
    ("statements", "seq"),
    [
        (["DELETE FROM audit WHERE seq = 4"], 5),
        (["DELETE FROM audit"], 5),
        (["DELETE FROM meta WHERE key = 'audit_head'"], None),
        (["UPDATE meta SET value = '2 x' WHERE key = 'audit_head'"], None),
        (["UPDATE meta SET value = 'rubbish' WHERE key = 'audit_head'"], None),
        (["UPDATE audit SET digest = 'x' WHERE seq = 4"], 4),
    ],
)
def test_a_damaged_trail_stops_no_command_and_its_damage_stays_visible(
    journal: Journal, edit: Edit, statements: list[str], seq: int | None
) -> None:
    moved(journal)
    edit(*statements)
    moved(journal)
    found = journal.verify_audit().broken
    assert (None if found is None else found.seq) == seq


def test_only_a_copy_of_the_head_reveals_a_trail_that_was_removed_completely(
    journal: Journal, edit: Edit
) -> None:
    moved(journal)
    head = journal.verify_audit().head
    edit("DELETE FROM audit", "UPDATE meta SET value = '0' WHERE key = 'audit_head'")
    assert journal.verify_audit() == Verified(entries=0, head=START, broken=None)
    moved(journal)
    assert journal.verify_audit().broken is None
    assert broken(journal, head)[1].startswith("no entry has the known head")


def test_pruning_keeps_the_trail(journal: Journal, clock: Clock) -> None:
    moved(journal)
    clock.now += 1000 * 86400.0
    journal.prune()
    assert journal.operations() == []
    assert (journal.verify_audit().entries, journal.verify_audit().broken) == (4, None)


def test_the_trail_on_a_server_can_be_closed_to_edits(postgresql: postgres.Server) -> None:
    """With the rights that docs/security.md grants, vmckpt works, and cannot edit entries."""
    place = postgresql.place()
    Journal(place).close()
    schema_name = place.rpartition("%3D")[2]
    role = f"limited_{schema_name}"
    for statement in (
        f"CREATE ROLE {role} LOGIN", f"GRANT USAGE ON SCHEMA {schema_name} TO {role}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema_name} TO {role}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema_name} TO {role}",
        f"REVOKE UPDATE, DELETE, TRUNCATE ON audit FROM {role}",
    ):  # fmt: skip
        postgresql.sql(statement, schema_name)
    limited = place.replace("postgres@", f"{role}@")
    with Journal(limited) as journal:
        id_ = moved(journal)
        journal.ask(journal.begin(WEB1), RequestKind.CANCEL, {}, "eve@desk")
        journal.prune()
        assert journal.operation(id_, ended=True).outcome == "completed"
        assert (journal.verify_audit().entries, journal.verify_audit().broken) == (6, None)
    engine = create_engine(limited.replace("postgresql://", "postgresql+psycopg://"))
    for edit in ("UPDATE audit SET guest = 'x'", "DELETE FROM audit", "TRUNCATE audit"):
        with pytest.raises(DBAPIError, match="permission denied"), engine.begin() as connection:
            connection.execute(text(edit))
    engine.dispose()
    postgresql.sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_writer_on_a_server_waits_for_the_entry_of_the_other(
    postgresql: postgres.Server,
) -> None:
    place = postgresql.place()
    with Journal(place) as one, Journal(place) as other, ThreadPoolExecutor(1) as pool:
        id_ = other.begin(WEB1)
        ended: list[Future[None]] = []

        def work(connection: Connection) -> None:
            deed = Deed(what="began", job="m-1", kind="k", guest="g", source=None, target=None)
            now = one._now()
            audit_trail.append(connection, one._database, controller_identity.actor(), deed, now)
            ended.append(pool.submit(other.finish, id_, "completed", None))
            until = Deadline(20)
            while postgresql.sql("SELECT count(*) FROM pg_locks WHERE NOT granted") == "0":
                assert not until.passed()
                time.sleep(0.02)

        one._database.write(work)
        ended[0].result(timeout=20)
        assert [entry.fact.deed.what for entry in one.audit()] == ["began", "began", "ended"]
        assert one.verify_audit().broken is None


def test_several_processes_append_to_one_chain(place: Path | str) -> None:
    Journal(place).close()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for one in writers:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    assert [one.communicate("go\n", timeout=60)[0] for one in writers] == ["", "", ""]
    with Journal(place) as journal:
        assert (journal.verify_audit().entries, journal.verify_audit().broken) == (60, None)
