"""Run schedules: read the state, decide by `agenda.agenda`, and do one piece of work per lane.

Failed work is retried after a pause and does not delay other work.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import Any

from vmckpt.errors import (
    Cancelled,
    GuestLocked,
    LeaseLost,
    StoreError,
    VmckptError,
    silent_hosts,
    some,
)
from vmckpt.model.events import WorkDone, WorkFailed
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.policy.model import Policy
from vmckpt.scheduler import schedules
from vmckpt.scheduler.agenda import (
    Agenda,
    Order,
    Row,
    Scene,
    Shelf,
    Trouble,
    agenda,
    needs_recovery,
    troubled,
)
from vmckpt.scheduler.executor import Executor
from vmckpt.scheduler.jobs import (
    CollectGarbage,
    CopySnapshot,
    CreateGroup,
    CreateSnapshot,
    VerifySnapshots,
    Work,
)
from vmckpt.scheduler.leases import ScheduleLeases
from vmckpt.scheduler.schedules import Reckon, ScheduleSelection, Sighted
from vmckpt.snapshot.group.create import GroupTaken
from vmckpt.snapshot.request import Taken
from vmckpt.units import Seconds, show_bytes, show_seconds

_LOOK = Seconds(60.0)
"""Maximum time between two checks, because guests may appear or disappear meanwhile."""
_REST = Seconds(0.5)
"""Minimum time between two checks."""
_MEND = Seconds(30.0)
_FEW = 3
"""Maximum number of hosts that are reported one by one when they stop or resume answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event that a service reports."""

    event: str
    """Kind of event, such as "started", "took", "copied", "failed" or "stopped"."""
    text: str
    at: float = field(default_factory=time.time)
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        at = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds")
        return {"at": at, "event": self.event, "text": self.text, **self.values}


Guests = Callable[[], Awaitable[tuple[Sequence[tuple[Host, Guest]], Mapping[str, str]]]]
"""Returns the guests of all hosts that answer, and the error of each other host, by host name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The configuration of a service, and the functions that it calls."""

    stores: Sequence[str]
    policies: Sequence[Policy]
    wanted: ScheduleSelection
    guests: Guests
    take: Callable[[CreateSnapshot, asyncio.Event], Awaitable[Taken]]
    """Takes a snapshot; setting the event cancels it."""
    cut: Callable[[CreateGroup, asyncio.Event], Awaitable[GroupTaken]]
    """Takes snapshots of a group; setting the event cancels them."""
    reckon: Reckon
    """Computes the interval for `every: auto`. The call blocks, so it runs in a thread."""
    recover: Callable[[], Awaitable[object]]
    """Recovers the jobs of dead controllers."""
    hands: Executor
    zone: tzinfo
    tell: Callable[[Told], None]


_WORDS = {"copy": "copied", "prune": "pruned", "verify": "verified", "collect": "collected"}


class Service:
    """A service that runs schedules until `run` returns."""

    def __init__(
        self, setting: Setting, claims: ScheduleLeases | None, stop: asyncio.Event
    ) -> None:
        """`claims`: leases on schedules; None: only `look` may be used. `stop`: stops `run`."""
        self._setting, self._claims, self._stop = setting, claims, stop
        self._giving_up = asyncio.Event()
        self._sighted: dict[str, Sighted] = {}
        self._taken: dict[tuple[str, str], float] = {}
        self._proved: dict[tuple[str, str], float] = {}
        self._collected: dict[str, float] = {}
        self._troubles: dict[str, Trouble] = {}
        self._tasks: dict[asyncio.Task[None], Work] = {}
        self._said: dict[str, str] = {}
        """Problems already reported, by subject, so that each is reported only once."""
        self._mended = time.monotonic()
        self.failures = 0

    async def run(self, *, once: bool) -> None:
        """Carry out due work until `stop` is set or, with `once`, until no work is left.

        Raises LeaseLost; with `once`, also VmckptError or OSError if the state cannot be read.
        """
        done: set[str] = set()
        try:
            while not self._stop.is_set():
                await self._recover_if_needed()
                scene = await self._scene_or_none(once=once)
                if scene is None:
                    await self._wait(None, time.time())
                    continue
                told = agenda(scene)
                for work in told.work:
                    if once and isinstance(work, CreateSnapshot | CreateGroup) and work.key in done:
                        continue  # this snapshot is due for the second time
                    done.add(work.key)
                    task = asyncio.create_task(self._do(work), name=str(work))
                    self._tasks[task] = work
                if once and not self._tasks:
                    return
                self._say_next(told)
                await self._wait(told, scene.now)
        finally:
            await self._end()

    async def look(self) -> tuple[Agenda, Scene]:
        """Return the agenda and the current state; start no work. Raises VmckptError, OSError."""
        scene = await self._scene()
        return agenda(scene), scene

    # Looking

    async def _scene_or_none(self, *, once: bool) -> Scene | None:
        """Return the current state, or None if it cannot be read. Raises LeaseLost.

        With `once`, raises VmckptError or OSError instead of returning None.
        """
        try:
            scene = await self._scene()
        except LeaseLost:
            raise
        except (VmckptError, OSError) as exc:
            if once:
                raise
            self._say_once("looking", f"cannot determine what is due: {exc}")
            return None
        self._said.pop("looking", None)
        ids = {(name, id_) for name, shelf in scene.shelves.items() for id_ in shelf or ()}
        away = {name for name, shelf in scene.shelves.items() if shelf is None}
        self._proved = {key: at for key, at in self._proved.items() if key in ids or key[0] in away}
        return scene

    async def _scene(self) -> Scene:
        setting = self._setting
        found, silent = await setting.guests()
        self._say_silent(silent)
        back = sorted({host.name for host, _ in found} - set(silent))
        self._say_back([f"host {name}" for name in back if f"host {name}" in self._said])
        self._sighted = schedules.sighted(found, silent, self._sighted)
        orders, wrong = await asyncio.to_thread(
            schedules.ordered, self._sighted.values(), setting.policies, setting.stores,
            setting.wanted, setting.reckon,
        )  # fmt: skip
        for line in wrong:
            self._say_once(line, line)
        mine = await self._claimed(orders)
        shelves: dict[str, Shelf | None] = {}
        for name in dict.fromkeys(name for order in mine for name, _ in order.stores):
            shelves[name] = await self._shelf(name)
        return Scene(
            now=time.time(), zone=setting.zone, orders=mine, shelves=shelves, taken=self._taken,
            proved=self._proved, opens=setting.hands.identity is not None,
            collected=self._collected, busy=self._busy, troubles=self._troubles,
        )  # fmt: skip

    @property
    def _busy(self) -> frozenset[str]:
        works = self._tasks.values()
        cuts = (work.lanes for work in works if isinstance(work, CreateGroup))
        return frozenset(work.lane for work in works).union(*cuts)

    async def _claimed(self, orders: Sequence[Order]) -> list[Order]:
        if self._claims is None:
            return list(orders)
        names = {order: f"{order.policy}/{order.schedule.name}" for order in orders}
        if self._claims.cancelled():
            self._stop.set()
        mine = await asyncio.to_thread(self._claims.claim, set(names.values()))
        return [order for order in orders if names[order] in mine] if self._claims.holds else []

    async def _shelf(self, name: str) -> Shelf | None:
        try:
            shelf = await asyncio.to_thread(self._setting.hands.shelves.look, name)
        except (StoreError, OSError) as exc:
            self._say_once(f"store {name}", f"store {name} cannot be read: {exc}")
            return None
        self._answers_again(f"store {name}")
        return shelf

    async def _recover_if_needed(self) -> None:
        if time.monotonic() - self._mended < _MEND:
            return
        self._mended = time.monotonic()
        stale = self._claims is not None and self._claims.stale
        if stale or any(one.recover for one in self._troubles.values()):
            with suppress(VmckptError):
                await self._setting.recover()
                if self._claims is not None:
                    self._claims.settled()

    # Doing

    async def _do(self, work: Work) -> None:
        try:
            if isinstance(work, CreateSnapshot | CreateGroup):
                await self._take(work)
            else:
                did = await asyncio.to_thread(self._setting.hands.run, work)
                self._remember(work)
                event = _WORDS[work.what] if did.good else "damaged"
                self._tell(event, did.text, did.values)
                self.failures += not did.good
            if self._troubles.pop(work.key, None) is not None:
                self._record(WorkDone(key=work.key, work=str(work)))
        except Cancelled:
            if self._giving_up.is_set():
                self._tell("given up", f"cancelled: {work}")
            else:
                self._failed(work, "the job was cancelled")
        # An error in one piece of work must not stop other work.
        except Exception as exc:  # noqa: BLE001
            why = str(exc) if isinstance(exc, VmckptError) else repr(exc)
            self._failed(work, why, recover=needs_recovery(exc))

    async def _take(self, work: CreateSnapshot | CreateGroup) -> None:
        began = time.time()
        try:
            if isinstance(work, CreateGroup):
                cut = await self._setting.cut(work, self._giving_up)
                members = list(cut.members)
            else:
                members = [await self._setting.take(work, self._giving_up)]
        except GuestLocked:
            # A dead job that holds a lock on the guest is recovered before the next attempt.
            self._mended = min(self._mended, time.monotonic() - _MEND)
            raise
        guests = (
            [one for one, _, _ in work.guests] if isinstance(work, CreateGroup) else [work.guest]
        )
        self._taken.update({(one, work.schedule): began for one in guests})
        for taken in members:
            self._took(taken, work.schedule)

    def _took(self, taken: Taken, schedule: str) -> None:
        self._tell(
            "took",
            f"took {taken.id} of {taken.guest} ({schedule}) into {taken.store}: paused for"
            f" {show_seconds(taken.pause)}, completed in {show_seconds(taken.took)},"
            f" {show_bytes(taken.written)} written",
            {**taken.as_json(), "schedule": schedule},
        )
        for warning in taken.warnings:
            self._tell("warning", f"{taken.guest}: {warning}")

    def _remember(self, work: Work) -> None:
        now = time.time()
        if isinstance(work, VerifySnapshots):
            self._proved.update({(work.store, id_): now for id_ in work.ids})
        if isinstance(work, CollectGarbage):
            self._collected[work.store] = now

    def _failed(self, work: Work, why: str, *, recover: bool = False) -> None:
        self.failures += 1
        now = time.time()
        trouble = troubled(self._troubles.get(work.key), now, why, recover=recover)
        self._troubles[work.key] = trouble
        wait = show_seconds(trouble.until - now)
        again = (
            f"retrying in {wait}"
            if trouble.times == 1 else f"failed {trouble.times} times, retrying in {wait}"
        )  # fmt: skip
        self._tell("failed", f"failed: {work}: {why} ({again})", {"times": trouble.times})
        guest = work.name if isinstance(work, CreateSnapshot | CopySnapshot) else None
        self._record(
            WorkFailed(key=work.key, work=str(work), guest=guest, why=why, times=trouble.times)
        )

    async def _wait(self, told: Agenda | None, now: float) -> None:
        """Wait until a piece of work has finished, work is due, or `stop` is set."""
        await asyncio.sleep(_REST)
        ahead: float = _LOOK
        if told is not None and told.next is not None:
            ahead = min(_LOOK, max(0.0, told.next - now - _REST))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait(
            [stopping, *self._tasks], timeout=ahead, return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        self._tasks = {task: work for task, work in self._tasks.items() if not task.done()}

    async def _end(self) -> None:
        """Cancel the work in progress, and wait until all of it has stopped."""
        self._giving_up.set()
        self._setting.hands.stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Reporting

    def _record(self, event: WorkFailed | WorkDone) -> None:
        """Record an event in the journal, so that any service can send an alert for it."""
        if self._claims is not None:
            self._claims.report(event)

    def _tell(self, event: str, text: str, values: Mapping[str, Any] | None = None) -> None:
        self._setting.tell(Told(event=event, text=text, values=values or {}))

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self.failures += 1
            self._tell("warning", text)
        self._said[key] = text

    def _say_silent(self, silent: Mapping[str, str]) -> None:
        """Report hosts that no longer answer: each one, or many of them in one line."""
        new = {name: why for name, why in silent.items() if f"host {name}" not in self._said}
        if len(new) > _FEW:
            self.failures += 1
            self._tell("warning", f"{len(new)} hosts do not answer: {silent_hosts(new)}")
            self._said |= {f"host {name}": why for name, why in new.items()}
        for name, why in silent.items():
            self._say_once(f"host {name}", f"{name} does not answer: {why}")

    def _say_back(self, keys: Sequence[str]) -> None:
        """Report hosts that answer again: each one, or many of them in one line."""
        if len(keys) > _FEW:
            names = some(key.removeprefix("host ") for key in keys)
            self._tell("mended", f"{len(keys)} hosts answer again: {names}")
            for key in keys:
                del self._said[key]
            return
        for key in keys:
            self._answers_again(key)

    def _answers_again(self, key: str) -> None:
        if self._said.pop(key, None) is not None:
            self._tell("mended", f"{key} answers again")

    def _say_next(self, told: Agenda) -> None:
        """Report once what is due next; report nothing while work is in progress."""
        coming = [row for row in told.rows if row.due is not None]
        if self._tasks or told.work:
            return
        text = "nothing is scheduled" if not told.rows else "no snapshot can be taken now"
        if coming:
            row = min(coming, key=lambda one: one.due or 0.0)
            text = f"next: {row.order.place.name} ({row.order.schedule.name}) at {self._clock(row)}"
        if self._said.get("next") != text:
            self._said["next"] = text
            self._tell("next", text)

    def _clock(self, row: Row) -> str:
        at = datetime.fromtimestamp(row.due or 0.0, self._setting.zone)
        return at.strftime("%Y-%m-%d %H:%M:%S")
