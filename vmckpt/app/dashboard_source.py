"""Data sources of the dashboard: real hosts and the journal, a simulation, or a recording."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vmckpt.errors import HypervisorError, JournalError, VmckptError
from vmckpt.hypervisor import same_host as same_hosts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.host_facts import HostPoller
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs as journal_jobs
from vmckpt.journal import location, maintenance
from vmckpt.journal.jobs import JobDetail, JobView, News
from vmckpt.model.guest import (
    Copies,
    FleetNow,
    GuestNow,
    HostNow,
    SnapshotNow,
    confirmed,
    two_copies,
)
from vmckpt.model.same_host import SameUuid
from vmckpt.policy import loader
from vmckpt.policy.model import Policy
from vmckpt.simulation import fleet
from vmckpt.simulation.replay import Replayed
from vmckpt.simulation.source import Showing

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal


T = TypeVar("T")
_AT_ONCE = 16
"""Number of hosts that are polled at the same time."""
_FIRST, _LATER = 3.0, 0.5
"""Seconds to wait for hosts at the first poll, which has to connect, and at later polls."""
_REST, _LONGEST = 9.0, 120.0
"""The pause between two polls of a host: a multiple of the last poll's duration, and its maximum in
seconds."""
_Look = tuple[HostNow, tuple[GuestNow, ...]]


class Source(Protocol):
    """A source of the dashboard's data. If a call raises VmckptError, it may be repeated later."""

    title: str
    """A description of the source, such as "a simulation"; empty for the hosts of an inventory."""

    async def fleet(self) -> FleetNow: ...

    async def jobs(self, ended: int) -> Sequence[JobView]:
        """Return all active jobs, and the latest `ended` jobs that have ended."""

    async def job(self, id_: str) -> JobDetail:
        """Return one job with all its details."""

    async def news(self, id_: str, event: int, sample: int) -> News:
        """Return a job's events and samples that follow the given event and sample.

        `id_`: the job's ID; `event`, `sample`: numbers of the last ones already known; 0: none.
        """

    async def parts(self, id_: str) -> Sequence[JobView]:
        """Return the migrations of a job for all guests of a host, the first migration first."""

    async def protections(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the status of each protection whose hosts are known, by job.

        See app.protection.job_status.
        """

    async def snapshots(self) -> Sequence[SnapshotNow]:
        """Return the snapshots of all stores, store by store, the oldest snapshot first.

        A store that cannot be read has a single entry, with the reason.
        """

    async def close(self) -> None: ...


class Live:
    """The real hosts of an inventory, and the journal."""

    title = ""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._hosts = {name: Hypervisor(host) for name, host in inventory.hosts.items()}
        self._glancers = {name: HostPoller(host) for name, host in self._hosts.items()}
        self._narrow = asyncio.Semaphore(_AT_ONCE)
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, _Look] = {}
        self._not_before: dict[str, float] = {}
        self._looked: dict[str, float] = {}
        """By host: when the last answered poll began, by time.monotonic()."""
        self._twice: dict[str, float] = {}
        """By guest UUID: when it was first seen running on two hosts, by time.monotonic()."""
        self._compared: dict[tuple[str, ...], Sequence[SameUuid]] = {}
        """By names of hosts: which of them have the same UUID, and which are one host."""
        self._held: Mapping[str, str] = {}
        """By host in maintenance: the reason, as last read from the journal."""
        self._opening = asyncio.Lock()
        self._journal: Journal | None = None

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        # Connections are closed concurrently, because a silent host takes seconds.
        await asyncio.gather(*(one.__aexit__() for one in self._hosts.values()))
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    async def fleet(self) -> FleetNow:
        """Poll the hosts. For a host that does not answer in time, returns the last known state."""
        first = not self._asking
        now = time.monotonic()
        for name in self._glancers:
            idle = name not in self._asking or self._asking[name].done()
            if idle and now >= self._not_before.get(name, now):
                self._asking[name] = asyncio.create_task(self._look(name))
        if (told := await asyncio.to_thread(_held)) is not None:
            self._held = told
        held = self._held
        if under_way := [one for one in self._asking.values() if not one.done()]:
            await asyncio.wait(under_way, timeout=_FIRST if first else _LATER)
        found = [self._known.get(name) or (self._silent(name, "no answer yet"), ())
                 for name in self._glancers]  # fmt: skip
        found = await self._without_second_names(found)
        hosts = tuple(replace(host, closed=held.get(host.name)) for host, _ in found)
        guests = tuple(guest for _, told in found for guest in told)
        return FleetNow(at=time.time(), hosts=hosts, guests=guests, copies=self._copies(guests))

    async def _without_second_names(self, found: Sequence[_Look]) -> list[_Look]:
        """Return `found`, with an error instead of the guests for each second name of a host.

        Only hosts that seem to run the same guest are compared, until the result is known.
        """
        guests = [guest for _, told in found for guest in told]
        for twice in two_copies((one.host, one) for one in guests):
            if twice.hosts in self._compared:
                continue
            same = await same_hosts.among([self._hosts[name] for name in twice.hosts])
            if all(one.one is not None for one in same):
                self._compared[twice.hosts] = same
        second = {
            one.second: one for same in self._compared.values() for one in same if one.one
        }  # fmt: skip
        return [
            (self._silent(host.name, f"{one.text}; {one.hint}"), ())
            if (one := second.get(host.name)) is not None else (host, told)
            for host, told in found
        ]  # fmt: skip

    def _copies(self, guests: Sequence[GuestNow]) -> tuple[Copies, ...]:
        found = two_copies((one.host, one) for one in guests)
        now = time.monotonic()
        self._twice = {one.uuid: self._twice.get(one.uuid, now) for one in found}
        return confirmed(found, self._twice, self._looked)

    async def _look(self, name: str) -> None:
        async with self._narrow:
            began = time.monotonic()
            try:
                self._known[name] = await self._glancers[name].poll()
                self._looked[name] = began
            except HypervisorError as exc:
                self._known[name] = self._silent(name, exc.message), ()
            # A silent host occupies a slot for a long time, so it is not polled again immediately.
            ended = time.monotonic()
            self._not_before[name] = ended + min(_LONGEST, _REST * (ended - began))

    def _silent(self, name: str, why: str) -> HostNow:
        return HostNow(name=name, error=why, labels=self._inventory.host(name).labels)

    async def jobs(self, ended: int) -> Sequence[JobView]:
        return await self._read(lambda journal: _jobs(journal, ended)) if _journal() else ()

    async def job(self, id_: str) -> JobDetail:
        return await self._read(lambda journal: journal_jobs.job(journal, id_))

    async def news(self, id_: str, event: int, sample: int) -> News:
        return await self._read(lambda journal: journal_jobs.news(journal, id_, event, sample))

    async def parts(self, id_: str) -> Sequence[JobView]:
        return await self._read(lambda journal: journal_jobs.parts(journal, id_))

    async def protections(self) -> Mapping[str, Mapping[str, Any]]:
        from vmckpt.app import protection  # noqa: PLC0415  # loads modules used only here

        found = (
            await self._read(lambda journal: journal.delegated_to_agents()) if _journal() else ()
        )
        return await protection.protection_summaries(
            self._inventory, [one for one in found if one.kind == "protect"]
        )

    async def snapshots(self) -> Sequence[SnapshotNow]:
        return await asyncio.to_thread(_snapshots, self._inventory)

    async def _read(self, ask: Callable[["Journal"], T]) -> T:
        """Run a query on the journal, which stays open. Returns the query's result."""
        async with self._opening:
            if self._journal is None:
                self._journal = await asyncio.to_thread(
                    lambda: journal_jobs.open_journal(read_only=True)
                )
        return await asyncio.to_thread(ask, self._journal)


def _journal() -> bool:
    """Return whether a journal exists; there is none before the first job."""
    return location.there(location.default())


def _held() -> Mapping[str, str] | None:
    """Return the reason for each host in maintenance, or None if the journal cannot be read.

    The error is reported elsewhere.
    """
    try:
        return {name: one.closed for name, one in maintenance.held().items()}
    except JournalError:
        return None


def _jobs(journal: "Journal", ended: int) -> Sequence[JobView]:
    found = journal_jobs.jobs(journal, everything=ended > 0, limit=ended)
    return sorted(found, key=lambda one: not one.operation.active)


def _snapshots(inventory: Inventory) -> Sequence[SnapshotNow]:
    # Imported here, so that only callers that list snapshots load these modules.
    from vmckpt.app import snapshot_store  # noqa: PLC0415

    found: list[SnapshotNow] = []
    for name in inventory.stores:
        try:
            told = snapshot_store.listing(inventory, name)
        except VmckptError as exc:
            found.append(SnapshotNow(id="", name="", store=name, wrong=str(exc)))
            continue
        found += [_snapshot(name, one) for one in told]
    return found


def _snapshot(store: str, one: Any) -> SnapshotNow:
    public = one.public
    if public is None:
        return SnapshotNow(id=one.id, name="", store=store, pinned=one.pinned, wrong=one.wrong)
    last = one.verdict.last
    return SnapshotNow(
        id=one.id, name=public.name, store=store, guest=public.guest,
        guest_uuid=public.guest_uuid, made_at=public.made_at, memory=public.memory,
        disks=public.disks, new=public.new, parent=public.parent, group=public.group,
        schedule=public.schedule, pinned=one.pinned,
        verified="never" if last is None else str(last),
        damaged=last is not None and not last.good,
        verified_at=None if last is None else last.at,
        wrong=None if one.trusted else "its writer is not trusted by this controller",
    )  # fmt: skip


def simulated(text: str) -> Showing:
    """Return a simulated fleet. `text`: hosts and guests, like "24x300". Raises BadInput."""
    hosts, guests = fleet.parsed(text)
    return Showing(hosts, guests)


def replayed(path: Path) -> Replayed:
    """Return a replay of a recorded migration. Raises BadInput."""
    return Replayed(path)


def policies() -> Sequence[Policy]:
    """Return the policies shipped with vmckpt."""
    return loader.survey(loader.folder(None, None)).policies
