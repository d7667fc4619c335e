"""Export metrics, and send alerts by webhooks."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vmckpt.app.dashboard_source import Live
from vmckpt.errors import JournalError, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal import evacuation_progress, jobs
from vmckpt.journal.follow import ENDED, Follower, Happening
from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import WHOLE_HOST
from vmckpt.model.webhook import WebhookOptions
from vmckpt.monitor import alerts
from vmckpt.monitor.alerts import Lasting, Page
from vmckpt.monitor.health import HealthSnapshot, troubles
from vmckpt.monitor.prometheus import Exporter, Served
from vmckpt.monitor.webhooks import MOST, Poster
from vmckpt.scheduler.leases import LeaseOwner
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal

_FOLLOW = 1.0
_LOOK = 10.0
_STORES = 300.0
"""Stores are listed so often, and when a snapshot has ended: in a bucket that costs."""


@dataclass(slots=True)
class Monitor:
    """Looks at everything, again and again, and tells it; an async context manager."""

    inventory: Inventory
    wishes: WebhookOptions
    warn: Callable[[str], None]
    whose: Callable[[], Awaitable[LeaseOwner]]
    """Which service sends pages."""
    exporter: Exporter = field(default_factory=Exporter)
    served: Served | None = None
    _source: Live = field(init=False)
    _posters: list[Poster] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _due: deque[Page] = field(default_factory=lambda: deque(maxlen=MOST))
    """Not sent yet: it is not known whether another service does."""
    _lasting: Mapping[str, Lasting] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _stores: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "Monitor":
        """Raises OSError if the endpoint's address cannot be had, BadInput."""
        if self.wishes.webhooks:
            self._posters = [Poster(one, self.warn) for one in self.inventory.webhooks]
        if self.wishes.metrics is not None:
            self.served = Served(self.exporter, self.wishes.metrics)
        self._source = Live(self.inventory)
        for poster in self._posters:
            poster.start()
        for work in (self._follow, self._look, self._look_into_stores):
            self._tasks.append(asyncio.create_task(self._lasting_work(work), name=work.__name__))
        return self

    async def _lasting_work(self, work: Callable[[], Awaitable[None]]) -> None:
        """One that ends by a fault of ours says so: what it tells would stand still in silence."""
        try:
            await work()
        except Exception as exc:  # noqa: BLE001
            self.warn(f"{work.__name__.strip('_')} has ended, please report it: {exc!r}")

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._posters))
        await self._source.close()
        if self.served is not None:
            await asyncio.to_thread(self.served.close)

    @property
    def told(self) -> Sequence[str]:
        """What it does, a line each."""
        lines = [f"pages go to {one.shown}" for one in self.inventory.webhooks if self._posters]
        if self.served is not None and self.wishes.metrics is not None:
            lines.append(f"metrics are at http://{self.served.address}/metrics")
        return lines

    # Looking

    async def _follow(self) -> None:
        """What happens, from now on."""
        journal: Journal | None = None
        follower: Follower | None = None
        try:
            while True:
                try:
                    if journal is None:
                        journal = await asyncio.to_thread(jobs.open_journal)
                    if follower is None:
                        follower = await asyncio.to_thread(Follower, journal)
                    happened = await asyncio.to_thread(follower.look)
                except JournalError as exc:
                    self._say_once("journal", f"the journal does not answer: {exc}")
                else:
                    self._answers("journal")
                    await self._take(happened)
                await asyncio.sleep(_FOLLOW)
        finally:
            if journal is not None:
                journal.close()

    async def _take(self, happened: Sequence[Happening]) -> None:
        for one in happened:
            self.exporter.take(one)
            if one.kind == ENDED and one.operation.kind in ("snapshot", "verify"):
                self._stores.set()
        await self._send([page for one in happened if (page := alerts.of_happening(one))])

    async def _look(self) -> None:
        """How hosts, jobs and protections stand."""
        while True:
            await self._see("hosts", self._source.fleet, "fleet")
            await self._see("jobs", lambda: self._source.jobs(0), "jobs")
            await self._see("protections", self._source.protections, "protections")
            with suppress(VmckptError):  # told above
                await self._count_moves()
            found = troubles(self.exporter.now)
            now = Seconds(time.monotonic())
            self._lasting, pages = alerts.watch(self._lasting, found, now, time.time())
            await self._send(pages)
            await asyncio.sleep(_LOOK)

    async def _count_moves(self) -> None:
        whole: Sequence[JobView] = [
            one for one in self.exporter.now.jobs or () if one.operation.kind in WHOLE_HOST
        ]
        moves = {}
        for one in whole:
            id_ = one.operation.id
            parts, steps = await self._source.parts(id_), (await self._source.job(id_)).steps
            moves[id_] = evacuation_progress.turns(one.operation, parts, steps)
        self.exporter.now = replace(self.exporter.now, turns=moves)

    async def _look_into_stores(self) -> None:
        while True:
            await self._see("stores", self._source.snapshots, "snapshots")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stores.wait(), _STORES)
            self._stores.clear()

    async def _see(self, what: str, look: Callable[[], Awaitable[Any]], name: str) -> None:
        """Look, and keep what is seen; what cannot be seen stays as it was, with its old time."""
        try:
            seen = await look()
        except (VmckptError, OSError) as exc:
            self._say_once(what, f"{what} cannot be looked at: {exc}")
            return
        self._answers(what)
        now = self.exporter.now
        looked = {**now.looked, what: time.time()}
        self.exporter.now = _with(now, name, seen, looked)

    # Telling

    async def _send(self, pages: Sequence[Page]) -> None:
        if not self._posters:
            return
        self._due.extend(pages)
        if not self._due or (whose := await self.whose()) is LeaseOwner.UNSURE:
            return  # twice is better than never
        if whose is LeaseOwner.OURS:
            for page in self._due:
                for poster in self._posters:
                    poster.post(page)
        self._due.clear()

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.warn(text)

    def _answers(self, what: str) -> None:
        self._said.discard(what)


def _with(now: HealthSnapshot, name: str, seen: Any, looked: dict[str, float]) -> HealthSnapshot:
    changed: dict[str, Any] = {name: seen, "looked": looked}
    return replace(now, **changed)
