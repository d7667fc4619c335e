"""Run the service: snapshots by schedule, and the failure detector for protected guests."""

import asyncio
import functools
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from vmckpt import recovery as recovering
from vmckpt.app import fleet, permission, snapshot_store, snapshots, stores
from vmckpt.app.controller import Controller
from vmckpt.errors import JournalError
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs
from vmckpt.journal.records import Operation
from vmckpt.model.webhook import NO_MONITORING, MonitoringOptions
from vmckpt.policy.model import Auto
from vmckpt.scheduler import schedules
from vmckpt.scheduler.agenda import Agenda, Scene
from vmckpt.scheduler.executor import Executor
from vmckpt.scheduler.failure_detector import FailureDetector
from vmckpt.scheduler.jobs import CreateGroup, CreateSnapshot
from vmckpt.scheduler.leases import PAGES, VIGIL, LeaseOwner, ScheduleLeases
from vmckpt.scheduler.schedules import OptimalInterval, ScheduleSelection
from vmckpt.scheduler.service import Service, Setting, Told
from vmckpt.scheduler.store_cache import Shelves
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.group.create import GroupTaken
from vmckpt.snapshot.request import Taken, TakeRequest
from vmckpt.store.format.metadata import SCHEDULE

_REMEMBERED = 180 * 86400.0
"""How far back the journal is read, in seconds."""
_FRESH = 300.0


async def run(
    controller: Controller,
    wanted: ScheduleSelection,
    *,
    identity: Identity | None,
    once: bool,
    tell: Callable[[Told], None],
    wishes: MonitoringOptions = NO_MONITORING,
) -> int:
    """Run the schedules until the caller stops the service. Returns the number of failures.

    `identity`: opens encrypted snapshots for verification; None: only sealed data is verified.
    `once`: do what is due now, then return. `tell`: called with every event. `wishes`: options for
    metrics and alerts. Raises ReadOnly, JournalError, LeaseLost, BadInput, and OSError if the
    address for metrics cannot be bound.
    """
    inventory, stop = controller.inventory, controller.caller.stop
    permission.require(inventory, "run")
    warn = controller.caller.warn
    caller = replace(controller.caller, stop=asyncio.Event())

    async def recover() -> None:
        await recovering.recover_before(inventory, controller.policies, caller)

    await recover()
    watches = keeps_watch(inventory) and not once
    claims = await asyncio.to_thread(ScheduleLeases, socket.gethostname(), warn)
    async with AsyncExitStack() as around:
        around.push_async_callback(claims.end)
        if wishes != NO_MONITORING:
            # Loaded only by a service that exports metrics or sends alerts.
            from vmckpt.app.monitoring import Monitor  # noqa: PLC0415

            whose = functools.partial(asyncio.to_thread, claims.owner_of, PAGES)
            monitor = Monitor(inventory, wishes, warn, whose)
            await around.enter_async_context(monitor)
            tell = _counted(tell, monitor.exporter.told)
            for line in monitor.told:
                tell(Told(event="started", text=line))
        if watches:
            detector = FailureDetector(inventory, lambda: _is_ours(VIGIL, claims), tell)
            await around.enter_async_context(_detecting(detector, stop))
        setting = _setting(controller, wanted, identity=identity, tell=tell, recover=recover)
        service = Service(setting, claims, stop)
        tell(
            Told(event="started", text=f"started as {claims.job or 'a service without a journal'}")
        )
        await service.run(once=once)
    tell(Told(event="stopped", text="stopped"))
    return service.failures


def _counted(tell: Callable[[Told], None], count: Callable[[str], None]) -> Callable[[Told], None]:
    def both(told: Told) -> None:
        count(told.event)
        tell(told)

    return both


async def _is_ours(what: str, claims: ScheduleLeases) -> bool:
    return await asyncio.to_thread(claims.owner_of, what) is LeaseOwner.OURS


def keeps_watch(inventory: Inventory) -> bool:
    """Return whether a long-running service must run the failure detector.

    This is the case if a host has a fence agent.
    """
    return any(host.fence is not None for host in inventory.hosts.values())


@asynccontextmanager
async def _detecting(detector: FailureDetector, stop: asyncio.Event) -> AsyncIterator[None]:
    """Run the failure detector until the block ends; a failover in progress is completed.

    If a bug stops the detector, the service stops as well, so that its supervisor restarts it.
    """
    task = asyncio.create_task(detector.keep(), name="vigil")
    task.add_done_callback(lambda ended: None if ended.cancelled() else stop.set())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def due_now(
    controller: Controller, wanted: ScheduleSelection, tell: Callable[[Told], None]
) -> tuple[Agenda, Scene]:
    """Return the agenda and the facts on which it is based, without changing anything.

    `tell`: called with every event, such as a host that does not answer.
    """
    setting = _setting(controller, wanted, identity=None, tell=tell, recover=_nothing)
    return await Service(setting, None, asyncio.Event()).look()


async def _nothing() -> None:
    """Recover nothing, because `due_now` must not change anything."""


def _setting(
    controller: Controller,
    wanted: ScheduleSelection,
    *,
    identity: Identity | None,
    tell: Callable[[Told], None],
    recover: Callable[[], Awaitable[None]],
) -> Setting:
    inventory, policies = controller.inventory, controller.policies
    ring = stores.keyring()
    shelves = Shelves(lambda name: snapshot_store.open_store(inventory, name), ring.trusted)

    def acting(stop: asyncio.Event) -> Controller:
        return replace(controller, caller=replace(controller.caller, stop=stop))

    async def take(work: CreateSnapshot, stop: asyncio.Event) -> Taken:
        request = TakeRequest(guest=work.guest, memory=work.memory, tags={SCHEDULE: work.schedule})
        return await snapshots.take(acting(stop), work.store, request)

    async def cut(work: CreateGroup, stop: asyncio.Event) -> GroupTaken:
        request = TakeRequest(guest="", tags={SCHEDULE: work.schedule})
        names = [uuid for uuid, _, _ in work.guests]
        return await snapshots.take_group(acting(stop), work.store, names, request)

    return Setting(
        stores=tuple(inventory.stores),
        policies=policies,
        wanted=wanted,
        guests=lambda: fleet.guests(inventory),
        take=take,
        cut=cut,
        reckon=_Past().reckon,
        recover=recover,
        hands=Executor(shelves=shelves, keys=ring, identity=identity, stop=threading.Event()),
        zone=snapshot_store.local_zone(),
        tell=tell,
    )


class _Past:
    """The recent jobs of guests from the journal, cached for _FRESH seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Sequence[Operation]]] = {}

    def reckon(self, guest: str, auto: Auto) -> OptimalInterval:
        """See schedules.Reckon."""
        now = time.time()
        known = self._known.get(guest)
        if known is None or not 0 <= now - known[0] < _FRESH:
            known = self._known[guest] = (now, _past(guest, now))
        return schedules.optimal_interval(auto, known[1], now)


def _past(guest: str, now: float) -> Sequence[Operation]:
    try:
        with jobs.open_journal(read_only=True) as journal:
            return journal.recent(guest, now - _REMEMBERED)
    except JournalError:  # there is no journal yet
        return ()
