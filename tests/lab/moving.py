"""Moves one guest by a MoveOrder, without the command around it."""

import asyncio
from dataclasses import dataclass
from typing import Any

from tests.lab.bench import Bench
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import migration
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.model.migration import Driver, JobSample, JobTotals, MoveOrder


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
