"""Moves one guest by a MoveOrder, without the command around it, and what comes before a move."""

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.bench import Bench, uuid
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import migration, storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.migration.plan import storage_copy
from vmckpt.migration.plan.tls_checks import TlsVerdict, names_of, tls_findings
from vmckpt.model.disk import CopyOptions, CopyPlan, Made
from vmckpt.model.migration import Driver, JobSample, JobTotals, MoveOrder
from vmckpt.remote import images, probe
from vmckpt.remote.ssh import Remote

T = TypeVar("T")


def order(**wishes: Any) -> MoveOrder:
    usual: dict[str, Any] = {
        "driver": Driver.PEER_TO_PEER, "persistent": True, "autostart": False,
        "storage_proven": True, "bandwidth": None,
    }  # fmt: skip
    return MoveOrder(**(usual | wishes))


@dataclass(frozen=True)
class Moved:
    """How a move ended."""

    error: HypervisorError | None
    explained: str
    totals: JobTotals | None
    samples: tuple[JobSample, ...]

    @property
    def good(self) -> bool:
        return self.error is None


def other(host: str) -> str:
    return {"alpha": "beta", "beta": "alpha"}[host]


def move(
    bench: Bench,
    to: str = "beta",
    *,
    name: str = "web1",
    switch_in_pass: int | None = None,
    abort_after: float | None = None,
    **wishes: Any,
) -> Moved:
    """Move a guest; optionally switch to post-copy in a pass, or abort after some seconds."""

    async def run() -> Moved:
        inventory, given = bench.inventory, order(**wishes)
        async with (
            Hypervisor(inventory.host(other(to))) as source,
            Hypervisor(inventory.host(to)) as target,
        ):
            guest = await find_guest(source, name)
            assert guest is not None
            migrations = LibvirtMigrationDriver(source, target, guest.uuid)
            moving = asyncio.create_task(migrations.migrate(given))
            began, switched, samples = asyncio.get_running_loop().time(), False, []
            while not moving.done():
                await asyncio.wait([moving], timeout=0.1)
                sample = await migrations.sample()
                if sample is None or moving.done():
                    continue
                samples.append(sample)
                if switch_in_pass is not None and sample.iteration >= switch_in_pass:
                    if not switched:
                        await migrations.start_post_copy()
                    switched = True
                if abort_after is not None:
                    late = asyncio.get_running_loop().time() - began > abort_after
                    if late and sample.total:
                        await migrations.abort()
            error = moving.exception()
            assert error is None or isinstance(error, HypervisorError)
            assert switched or switch_in_pass is None or error is not None
            return Moved(
                error=error,
                explained="" if error is None
                else str(migration.explained(error, given, inventory.host(to))),
                totals=await migrations.totals() if error is None else None,
                samples=tuple(samples),
            )  # fmt: skip

    return asyncio.run(run())


def over_ssh(bench: Bench, work: Callable[[Remote, Remote], Awaitable[T]]) -> T:
    """A question to alpha and beta, or an order."""

    async def run() -> T:
        inventory = bench.inventory
        async with Remote(inventory.host("alpha")) as here, Remote(inventory.host("beta")) as there:
            return await work(here, there)

    return asyncio.run(run())


def planned(
    bench: Bench, wish: CopyOptions, chains: Mapping[str, Sequence[str]] | None = None
) -> CopyPlan:
    """As preflight would: drives and `chains` from libvirt, the rest over ssh."""
    known = uuid(bench)
    drives = bench.ask("alpha", lambda hypervisor: storage.drives(hypervisor, known))

    async def look(here: Remote, there: Remote) -> CopyPlan:
        below = [path for chain in (chains or {}).values() for path in chain]
        paths = [*(drive.path or "" for drive in drives), *below]
        same = await probe.same_files(here, there, paths)
        return await storage_copy.plan_copies(here, there, drives, same, wish, chains=chains or {})

    return over_ssh(bench, look)


def prepared(bench: Bench, plan: CopyPlan) -> Made:
    """Make the images on beta, under their names."""

    async def work(_: Remote, there: Remote) -> Made:
        made = await storage_copy.prepare(there, plan, storage_copy.new_suffix())
        await images.publish(there, made)
        return made

    return over_ssh(bench, work)


def verdict(bench: Bench) -> TlsVerdict:
    """From alpha to beta, as preflight would see it."""

    async def look(here: Remote, there: Remote) -> TlsVerdict:
        at_source, at_target = (
            await probe.look_at_certificates(here),
            await probe.look_at_certificates(there),
        )
        return tls_findings(
            source="alpha", target="beta", at_source=at_source, at_target=at_target,
            names=names_of(bench.inventory.host("beta"), at_target.hostname),
            now=datetime.datetime.now(datetime.UTC),
        )  # fmt: skip

    return over_ssh(bench, look)


def pki(bench: Bench, host: str) -> Path:
    """Where a host's certificates are, as this machine sees it."""
    return bench.plan.host(host).root / "etc/pki/qemu"
