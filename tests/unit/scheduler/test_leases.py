"""What one service alone does: whose it is, and what becomes of pages while that is not sure."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vmckpt.app import protection
from vmckpt.app.monitoring import Monitor
from vmckpt.errors import JournalError
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.webhook import NOBODY
from vmckpt.monitor.alerts import Page, State
from vmckpt.monitor.health import Trouble
from vmckpt.scheduler import leases as scheduler_leases
from vmckpt.scheduler.leases import LeaseOwner, ScheduleLeases


@pytest.fixture(autouse=True)
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))


def killed(what: str) -> str:
    """A service that died and held this; its job."""
    with Journal() as journal:
        dead = replace(controller_identity.this_process(), pid=1, started=1)
        id_ = journal.begin(NewOperation(kind="run", guest="schedules"), controller=dead)
        journal.acquire(id_, scheduler_leases.lease_of(what), by=dead)
    return id_


async def test_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ScheduleLeases("here", print), ScheduleLeases("here", print)
    assert (first.owner_of("pages"), second.owner_of("pages")) == (
        LeaseOwner.OURS,
        LeaseOwner.ANOTHERS,
    )

    killed("vigil")
    assert second.owner_of("vigil") is LeaseOwner.UNSURE
    assert second.stale

    def unreadable(*_: object) -> None:
        raise JournalError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "acquire", unreadable)
        assert second.owner_of("mine/often") is LeaseOwner.UNSURE
    await first.end()
    assert second.owner_of("pages") is LeaseOwner.ANOTHERS, "it is asked again after a while"
    second.settled()
    assert second.owner_of("pages") is LeaseOwner.OURS
    await second.end()


class Box:
    """Stands for a webhook."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def post(self, page: Page) -> None:
        self.taken.append(page.trouble.text)


def page(text: str) -> Page:
    return Page(key=text, state=State.ONCE, at=1.0, trouble=Trouble(text=text, hint="look"))


def test_pages_wait_until_it_is_sure_who_sends_them() -> None:
    says = [
        LeaseOwner.UNSURE,
        LeaseOwner.UNSURE,
        LeaseOwner.OURS,
        LeaseOwner.UNSURE,
        LeaseOwner.ANOTHERS,
        LeaseOwner.OURS,
    ]

    async def whose() -> LeaseOwner:
        return says.pop(0)

    box: Any = Box()
    nowhere = Inventory(path=Path("hosts.yaml"), hosts={}, observer=None)
    monitor = Monitor(nowhere, NOBODY, print, whose)
    monitor._posters = [box]

    async def send() -> None:
        await monitor._send([page("a host is silent")])
        await monitor._send([page("a guest is lost")])
        assert box.taken == []
        await monitor._send([])  # the next look finds nothing new, and knows
        assert box.taken == ["a host is silent", "a guest is lost"]
        await monitor._send([page("told by the other")])
        await monitor._send([])
        await monitor._send([page("ours again")])

    asyncio.run(send())
    assert box.taken == ["a host is silent", "a guest is lost", "ours again"]


async def test_a_watch_is_kept_by_a_service_that_lives_and_has_it() -> None:
    other = ScheduleLeases("here", print)  # runs, and does not keep watch
    assert not protection._watch_is_kept()
    dead = killed(scheduler_leases.VIGIL)
    assert not protection._watch_is_kept()
    with Journal() as journal:
        journal.finish(dead, "failed", None)
    assert other.owner_of(scheduler_leases.VIGIL) is LeaseOwner.OURS
    assert protection._watch_is_kept()
    await other.end()
    assert not protection._watch_is_kept()
