"""Pages wait until it is sure which service sends them."""

import asyncio
from pathlib import Path
from typing import Any

from tests.support.claims import journal
from vmckpt.app.monitoring import Monitor
from vmckpt.inventory import Inventory
from vmckpt.model.webhook import NOBODY
from vmckpt.monitor.alerts import Page, State
from vmckpt.monitor.health import Trouble
from vmckpt.scheduler.leases import LeaseOwner

__all__ = ["journal"]


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
