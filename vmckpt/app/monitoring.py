"""Export metrics, and send alerts to webhooks, Alertmanagers and Apprise services."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from socket import gethostname
from typing import TYPE_CHECKING, Any

from vmckpt.app.dashboard_source import Live
from vmckpt.errors import BadInput, JournalError, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal import evacuation_progress, follow, jobs
from vmckpt.journal.follow import ENDED, Follower, Happening
from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import WHOLE_HOST
from vmckpt.model.webhook import MonitoringOptions
from vmckpt.monitor import active_alerts, alerts
from vmckpt.monitor.active_alerts import Events
from vmckpt.monitor.alertmanager import Alertmanager
from vmckpt.monitor.alerts import Lasting, Page, State
from vmckpt.monitor.delivery import MOST, NotDelivered, Poster, Receiver
from vmckpt.monitor.health import HealthSnapshot, Trouble, troubles
from vmckpt.monitor.prometheus import Exporter, Served
from vmckpt.monitor.webhooks import WebhookReceiver
from vmckpt.scheduler.leases import LeaseOwner
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal

_FOLLOW = 1.0
_LOOK = 10.0
_STORES = 300.0
"""Seconds between two listings of the stores; each listing of a bucket costs money. Stores are also
listed when a snapshot or a verification has ended."""


@dataclass(slots=True)
class Monitor:
    """Polls the journal, hosts and stores, exports metrics and sends alerts.

    Use as `async with`.
    """

    inventory: Inventory
    wishes: MonitoringOptions
    warn: Callable[[str], None]
    whose: Callable[[], Awaitable[LeaseOwner]]
    """Returns which service sends alerts."""
    exporter: Exporter = field(default_factory=Exporter)
    served: Served | None = None
    _source: Live = field(init=False)
    _posters: list[Poster] = field(default_factory=list)
    _alertmanagers: list[Alertmanager] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _due: deque[Page] = field(default_factory=lambda: deque(maxlen=MOST))
    """Alerts not sent yet, because it is unknown whether another service sends them."""
    _lasting: Mapping[str, Lasting] = field(default_factory=dict)
    _events: Events = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _stores: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "Monitor":
        """Start. Raises OSError if the endpoint's address cannot be bound, BadInput."""
        if self.wishes.alerts:
            found = await asyncio.to_thread(receivers, self.inventory)
            self._posters = [Poster(one, self.warn) for one in found]
            self._alertmanagers = [
                Alertmanager(one, self.warn) for one in self.inventory.alertmanagers
            ]
        if self.wishes.metrics is not None:
            self.served = Served(self.exporter, self.wishes.metrics)
        self._source = Live(self.inventory)
        for one in self._clients:
            one.start()
        for work in (self._follow, self._look, self._look_into_stores):
            self._tasks.append(asyncio.create_task(self._lasting_work(work), name=work.__name__))
        return self

    async def _lasting_work(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, and warn if a bug stops it.

        Without the warning, the metrics that `work` updates would silently stop changing.
        """
        try:
            await work()
        except Exception as exc:  # noqa: BLE001
            self.warn(
                f"a part of monitoring ({work.__name__.strip('_')}) has stopped; report this bug:"
                f" {exc!r}"
            )

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._clients))
        await self._source.close()
        if self.served is not None:
            await asyncio.to_thread(self.served.close)

    @property
    def _clients(self) -> Sequence[Poster | Alertmanager]:
        return [*self._posters, *self._alertmanagers]

    @property
    def told(self) -> Sequence[str]:
        """A description of the monitor: one line for each endpoint and receiver."""
        lines = [f"alerts go to {one.shown}" for one in self._clients]
        if self.served is not None and self.wishes.metrics is not None:
            lines.append(f"metrics are at http://{self.served.address}/metrics")
        return lines

    # Polling

    async def _follow(self) -> None:
        """Follow new records in the journal."""
        journal: Journal | None = None
        follower: Follower | None = None
        try:
            while True:
                try:
                    if journal is None:
                        journal = await asyncio.to_thread(jobs.open_journal)
                    if follower is None:
                        begun = await asyncio.to_thread(Follower, journal)
                        await self._remember(journal)
                        follower = begun
                    happened = await asyncio.to_thread(follower.look)
                except JournalError as exc:
                    self._say_once("journal", f"cannot read the journal: {exc}")
                else:
                    self._answers("journal")
                    await self._take(happened)
                await asyncio.sleep(_FOLLOW)
        finally:
            if journal is not None:
                journal.close()

    async def _remember(self, journal: "Journal") -> None:
        """Find the events that are active although they happened before this service started."""
        if self._alertmanagers:
            now = time.time()
            past = await asyncio.to_thread(follow.past, journal, now - active_alerts.LIFETIME)
            self._events = active_alerts.events_after({}, past, now)

    async def _take(self, happened: Sequence[Happening]) -> None:
        for one in happened:
            self.exporter.take(one)
            if one.kind == ENDED and one.operation.kind in ("snapshot", "verify"):
                self._stores.set()
        before = self._events
        self._events = active_alerts.events_after(before, happened, time.time())
        await self._send([page for one in happened if (page := alerts.of_happening(one))])
        if self._events != before:
            await self._show()

    async def _look(self) -> None:
        """Poll hosts, jobs and protections, and send an alert for each problem."""
        while True:
            await self._see("hosts", self._source.fleet, "fleet")
            await self._see("jobs", lambda: self._source.jobs(0), "jobs")
            await self._see("protections", self._source.protections, "protections")
            with suppress(VmckptError):  # reported above
                await self._count_moves()
            found = troubles(self.exporter.now)
            now = Seconds(time.monotonic())
            self._lasting, pages = alerts.watch(self._lasting, found, now, time.time())
            await self._send(pages)
            await self._show()
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
        """Update the part `name` of the health snapshot with the result of `look`.

        `what`: the part's name in messages. If `look` fails, the part and its time stay unchanged.
        """
        try:
            seen = await look()
        except (VmckptError, OSError) as exc:
            self._say_once(what, f"cannot read {what}: {exc}")
            return
        self._answers(what)
        now = self.exporter.now
        looked = {**now.looked, what: time.time()}
        self.exporter.now = _with(now, name, seen, looked)

    # Sending

    async def _send(self, pages: Sequence[Page]) -> None:
        if not self._posters:
            return
        self._due.extend(pages)
        if not self._due or (whose := await self.whose()) is LeaseOwner.UNSURE:
            return  # alerts are kept: a duplicate is better than a lost alert
        if whose is LeaseOwner.OURS:
            for page in self._due:
                for poster in self._posters:
                    poster.post(page)
        self._due.clear()

    async def _show(self) -> None:
        """Update the Alertmanagers, unless another service does or it is unknown which one does."""
        if not self._alertmanagers or (whose := await self.whose()) is LeaseOwner.UNSURE:
            return
        ours = whose is LeaseOwner.OURS
        active = active_alerts.current(self._lasting, self._events) if ours else None
        for one in self._alertmanagers:
            one.show(active)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.warn(text)

    def _answers(self, what: str) -> None:
        self._said.discard(what)


def _with(now: HealthSnapshot, name: str, seen: Any, looked: dict[str, float]) -> HealthSnapshot:
    changed: dict[str, Any] = {name: seen, "looked": looked}
    return replace(now, **changed)


def receivers(inventory: Inventory) -> Sequence[Receiver]:
    """Return the webhooks and Apprise services of an inventory. Raises BadInput."""
    found: list[Receiver] = [WebhookReceiver(one) for one in inventory.webhooks]
    if inventory.apprise is not None:
        # Loaded only if it is used: the library is optional.
        from vmckpt.monitor import apprise_services  # noqa: PLC0415

        found += apprise_services.load(inventory.apprise)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """The result of sending a test alert to one receiver."""

    receiver: str
    error: str | None
    """None: the receiver accepted the alert."""

    def as_json(self) -> dict[str, Any]:
        return {"receiver": self.receiver, "delivered": self.error is None, "error": self.error}


async def send_test(inventory: Inventory) -> Sequence[Tested]:
    """Send a test alert once to each receiver, all at the same time. Raises BadInput."""
    if not inventory.sends_alerts:
        raise BadInput(
            f"{inventory.path} defines no receiver of alerts",
            hint="add webhooks:, alertmanagers: or apprise:; see docs/monitoring.md",
        )
    trouble = Trouble(
        text="this is a test of vmckpt notify", hint="no action is needed", host=gethostname()
    )
    now = time.time()
    page = Page(key="test", state=State.ONCE, at=now, trouble=trouble)
    found = await asyncio.to_thread(receivers, inventory)
    managers = [Alertmanager(one, _ignored) for one in inventory.alertmanagers]
    for one in managers:
        one.show([active_alerts.of_page(page)])
    try:
        return await asyncio.gather(
            *(_tested(one.shown, one.deliver(page)) for one in found),
            *(_tested(one.shown, one.send()) for one in managers),
        )
    finally:
        for receiver in found:
            await receiver.close()
        for manager in managers:
            await manager.close()


def _ignored(_: str) -> None:
    """Ignore a warning."""


async def _tested(name: str, sending: Awaitable[None]) -> Tested:
    try:
        await sending
    except (NotDelivered, OSError, ValueError) as exc:
        # A time limit has no text.
        return Tested(receiver=name, error=str(exc) or "no answer within the time limit")
    return Tested(receiver=name, error=None)
