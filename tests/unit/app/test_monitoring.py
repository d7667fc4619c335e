"""Alerts wait until it is sure which service sends them."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.claims import journal
from tests.tui.still import operation
from vmckpt.app import monitoring
from vmckpt.app.monitoring import Monitor
from vmckpt.errors import JournalError
from vmckpt.inventory import Inventory
from vmckpt.journal import follow
from vmckpt.journal.follow import ENDED, Happening
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.webhook import NO_MONITORING
from vmckpt.monitor.alerts import Page, State
from vmckpt.monitor.health import Trouble
from vmckpt.scheduler.leases import LeaseOwner

__all__ = ["journal"]

NOWHERE = Inventory(path=Path("hosts.yaml"), hosts={}, observer=None)


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
    monitor = Monitor(NOWHERE, NO_MONITORING, print, whose)
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


class Shown:
    """Stands for an Alertmanager."""

    def __init__(self) -> None:
        self.now: list[list[str] | None] = []

    def show(self, active: Any) -> None:
        keys = None if active is None else sorted(one.page.key for one in active)
        if self.now[-1:] != [keys]:
            self.now.append(keys)


def ended(guest: str, outcome: str) -> Happening:
    one = replace(operation("m-1"), guest=guest, outcome=outcome, report={})
    return Happening(
        at=time.time(), kind=ENDED, operation=one, values={"outcome": outcome, "error": None}
    )


def test_only_the_service_that_sends_alerts_informs_alertmanagers() -> None:
    says = [LeaseOwner.OURS, LeaseOwner.UNSURE, LeaseOwner.ANOTHERS, LeaseOwner.OURS]

    async def whose() -> LeaseOwner:
        return says.pop(0)

    shown: Any = Shown()
    monitor = Monitor(NOWHERE, NO_MONITORING, print, whose)
    monitor._alertmanagers = [shown]

    async def follow() -> None:
        await monitor._take([ended("web1", "failed")])
        await monitor._take([ended("web2", "failed")])  # unsure: nothing is sent
        assert shown.now == [["failed migrate web1"]]
        await monitor._take([ended("web3", "lost")])  # another service sends it
        await monitor._take([ended("web2", "completed")])
        await monitor._take([ended("web4", "completed")])  # nothing new: nothing is asked
        assert shown.now[1:] == [None, ["failed migrate web1", "unsure migrate web3"]]

    asyncio.run(follow())
    assert says == []


def test_failures_from_before_the_start_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", str(tmp_path / "journal.db"))
    shown: Any = Shown()

    async def whose() -> LeaseOwner:
        return LeaseOwner.OURS

    monitor = Monitor(NOWHERE, NO_MONITORING, print, whose)
    monitor._alertmanagers = [shown]
    with Journal() as journal:
        for guest, outcome in (("web1", "failed"), ("web2", "failed"), ("web2", "completed")):
            id_ = journal.begin(NewOperation(kind="snapshot", guest=guest))
            journal.finish(id_, outcome, None)

        async def follow() -> None:
            await monitor._remember(journal)
            await monitor._show()

        asyncio.run(follow())
    assert shown.now == [["failed snapshot web1"]]


def test_failures_from_before_the_start_are_read_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", str(tmp_path / "journal.db"))
    monkeypatch.setattr(monitoring, "_FOLLOW", 0.01)
    Journal().close()
    read, errors = follow.past, [JournalError("database is locked")]

    def past(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return [*read(*given), ended("web1", "failed")]

    async def whose() -> LeaseOwner:
        return LeaseOwner.OURS

    monkeypatch.setattr(follow, "past", past)
    warned: list[str] = []
    monitor = Monitor(NOWHERE, NO_MONITORING, warned.append, whose)
    shown: Any = Shown()
    monitor._alertmanagers = [shown]

    async def run() -> None:
        following = asyncio.create_task(monitor._follow())
        async with asyncio.timeout(10):
            while not monitor._events:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())
    assert warned == ["cannot read the journal: database is locked"]
    assert [page.key for page in monitor._events.values()] == ["failed migrate web1"]
