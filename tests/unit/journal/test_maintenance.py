"""Hosts in maintenance, as the journal keeps them; in SQLite and in PostgreSQL."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt import inventory
from vmckpt.app import snapshot_restore
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, Blocked, GuestLocked, JournalError, OrphanedJobs
from vmckpt.journal import jobs, maintenance
from vmckpt.journal import location as locations
from vmckpt.journal.records import NewOperation, RequestKind
from vmckpt.journal.store import Journal
from vmckpt.lease.controller_lease import host_resource
from vmckpt.migration.plan import preflight
from vmckpt.migration.plan.facts import Facts
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.snapshot.request import RestoreRequest
from vmckpt.snapshot.restore import restore as restore_restore


@pytest.fixture(autouse=True)
def here(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locations.VARIABLE, str(place))


def test_every_controller_sees_it_until_it_is_ended() -> None:
    assert maintenance.held() == {}
    held, new = maintenance.enter("alpha", "new memory")
    assert (held.host, held.why, new) == ("alpha", "new memory", True)
    assert maintenance.enter("alpha", "again") == (held, False)
    assert list(maintenance.held()) == ["alpha"]
    assert "new memory" in (maintenance.closed("alpha") or "")
    assert maintenance.closed("beta") is None
    maintenance.refuse("beta")
    with pytest.raises(Blocked, match=r"alpha: it is in maintenance .*new memory") as caught:
        maintenance.refuse("alpha")
    assert caught.value.host == "alpha"
    assert maintenance.leave("alpha") == held
    assert maintenance.held() == {}
    with pytest.raises(BadInput, match="not in maintenance"):
        maintenance.leave("alpha")


async def test_nothing_is_restored_there_but_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def restore(host: Host, *_: object, **__: object) -> None:
        asked.append(host.name)

    opened = SimpleNamespace(public=SimpleNamespace(host="alpha"))
    monkeypatch.setattr(snapshot_restore, "opened_anywhere", lambda *_: opened)
    monkeypatch.setattr(restore_restore, "restore", restore)
    hosts = "".join(f"  {name}: {{uri: 'test:///default'}}\n" for name in ("alpha", "beta"))
    known = inventory.parse(f"hosts:\n{hosts}", Path("hosts.yaml"))
    caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())
    maintenance.enter("alpha", "")

    async def order(**how: Any) -> None:
        acting = Controller(inventory=known, caller=caller)
        request = RestoreRequest(snapshot="s-1")
        await snapshot_restore.restore(acting, None, request, identity=None, **how)

    with pytest.raises(Blocked, match="alpha: it is in maintenance"):
        await order(on=None)
    assert asked == []
    await order(on="beta")
    # A guard puts back what has never left.
    await order(on=None, closed_too=True)
    assert asked == ["beta", "alpha"]


def test_nobody_attends_it_and_nobody_need(place: Path | str) -> None:
    held, _ = maintenance.enter("alpha", "")
    with Journal(place) as journal:
        assert journal.abandoned() == []
        assert jobs.attended(journal, journal.operation(held.job)) is True
        with pytest.raises(BadInput, match="maintenance leave alpha"):
            jobs.control(journal, held.job, RequestKind.CANCEL, {})
    # A guest may be called as a host is.
    jobs.require_not_delegated("alpha")


def test_the_hosts_name_means_what_is_done_to_it(place: Path | str) -> None:
    held, _ = maintenance.enter("alpha", "")
    with Journal(place) as journal:
        assert journal.operation("alpha").id == held.job
        id_ = journal.begin(NewOperation(kind="evacuate", guest="alpha", source="alpha"))
        assert journal.operation("alpha").id == id_
        assert [one.id for one in journal.on_host(["evacuate"], "alpha")] == [id_]


def test_one_at_a_time_empties_a_host(place: Path | str) -> None:
    with Journal(place) as journal:
        new = NewOperation(kind="evacuate", guest="alpha", source="alpha")
        first, second = journal.begin(new), journal.begin(new)
        journal.acquire(first, host_resource("alpha"))
        with pytest.raises(GuestLocked, match="host alpha is locked by job"):
            journal.acquire(second, host_resource("alpha"))
        journal.finish(first, "completed", None)
        journal.acquire(second, host_resource("alpha"))


def test_parts_of_a_job_are_found(place: Path | str) -> None:
    with Journal(place) as journal:
        whole = journal.begin(NewOperation(kind="evacuate", guest="alpha", source="alpha"))
        part = NewOperation(kind="migrate", guest="web1", detail={"part_of": whole})
        first = journal.begin(part)
        journal.begin(NewOperation(kind="migrate", guest="web2", detail={"part_of": "e-other"}))
        journal.begin(NewOperation(kind="migrate", guest="web3"))
        assert [one.id for one in journal.parts(whole, 0.0)] == [first]
        assert journal.parts(whole, journal.now() + 10) == []


def test_a_dead_controller_of_a_host_is_for_recovery(place: Path | str) -> None:
    with Journal(place) as journal:
        whole = journal.begin(NewOperation(kind="evacuate", guest="alpha", source="alpha"))
        journal.leave(whole)

        def never(*_: object) -> jobs.Answer:
            raise AssertionError("libvirt knows no guest of a host's name")

        with pytest.raises(OrphanedJobs, match="vmckpt recover"):
            jobs.control(journal, whole, RequestKind.CANCEL, {}, never)


def test_without_a_journal_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locations.VARIABLE, locations.NONE)
    assert maintenance.held() == {}
    with pytest.raises(JournalError, match=r"recorded in the journal.*; name a journal"):
        maintenance.enter("alpha", "")


def test_a_journal_that_is_not_there_yet_is_not_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "new.db"))
    assert maintenance.held() == {}
    assert not (tmp_path / "new.db").exists()


def test_one_that_cannot_be_read_keeps_no_guest_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.db"
    broken.write_text("this is no database, and long enough to be taken for one" * 100)
    monkeypatch.setenv(locations.VARIABLE, str(broken))
    assert maintenance.closed("alpha") is None


def test_nothing_is_moved_to_such_a_host() -> None:
    facts = Facts(name="web1", source="alpha", target="beta", target_closed="it is in maintenance")
    found = preflight.blockers(preflight.check_move(facts))
    assert [(one.code, one.where) for one in found if one.code == "host-in-maintenance"] == [
        ("host-in-maintenance", "beta")
    ]
