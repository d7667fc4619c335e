"""A guest's dirty rate and resident memory, measured through libvirt."""

import asyncio
import math

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint
from vmckpt.units import GIB, MIB, Bytes, Seconds

# Pages that QEMU samples per GiB of memory (migration/dirtyrate.h); libvirt cannot change this.
_PAGES_PER_GIB = 512
_LONGEST = 60
_INTERVAL = Seconds(0.1)
# How long to wait for the result after the requested time.
_LATE = Seconds(5.0)


async def dirtied(hypervisor: Hypervisor, guest: Guest, seconds: int) -> DirtyPoint:
    """Measure how much memory the guest dirties within `seconds`, by QEMU's page sampling.

    `seconds` is limited to the range 1 to 60. The measurement works with and without KVM. The
    result is rough: QEMU samples 128 pages per 256 MiB and returns whole MiB/s. Raises ReadOnly,
    and HypervisorError, also if the guest does not exist, or has a job, which the measurement would
    disturb.
    """
    seconds = min(_LONGEST, max(1, seconds))
    name = hypervisor.host.name
    now = await domains.find_guest(hypervisor, guest.uuid)
    if now is None or now.job is not None:
        why = "no such guest" if now is None else f"the guest has a job in progress: {now.job}"
        raise HypervisorError(
            f"{name}: cannot measure the dirty rate of {guest.name}: {why}", host=name
        )

    def start(connection: libvirt.virConnect) -> None:
        connection.lookupByUUIDString(guest.uuid).startDirtyRateCalc(seconds, 0)

    def read(connection: libvirt.virConnect) -> dict[str, int | str]:
        domain = connection.lookupByUUIDString(guest.uuid)
        return connection.domainListGetStats([domain], libvirt.VIR_DOMAIN_STATS_DIRTYRATE)[0][1]

    await hypervisor.execute("starting a dirty rate measurement", start)
    await asyncio.sleep(seconds)
    late = 0.0
    while True:
        stats = await hypervisor.query("reading the dirty rate", read)
        if stats.get("dirtyrate.calc_status") == libvirt.VIR_DOMAIN_DIRTYRATE_MEASURED:
            rate = int(stats.get("dirtyrate.megabytes_per_second", 0))
            return point(rate, int(stats.get("dirtyrate.calc_period", seconds)), guest.memory)
        if late >= _LATE:
            raise HypervisorError(
                f"{name}: QEMU did not finish the dirty rate measurement of {guest.name} in time",
                host=name,
            )
        await asyncio.sleep(_INTERVAL)
        late += _INTERVAL


def point(rate: int, seconds: int, memory: Bytes) -> DirtyPoint:
    """Convert QEMU's dirty rate to bytes, with the measurement's error.

    `rate`: whole MiB/s; `seconds`: the length of the measurement; `memory`: the guest's memory
    size. The error is two standard deviations of a proportion estimated from the sampled pages,
    plus the rounding error.
    """
    found = min(float(memory), rate * MIB * float(seconds))
    pages = max(1.0, _PAGES_PER_GIB * memory / GIB)
    # Laplace's rule of succession: even if no sampled page is dirty, the true share may exceed 0.
    share = (found / memory * pages + 1) / (pages + 2)
    sampling = 2 * memory * math.sqrt(share * (1 - share) / pages)
    return DirtyPoint(
        time=Seconds(float(seconds)), dirtied=found, error=sampling + 0.5 * MIB * seconds
    )


async def resident(hypervisor: Hypervisor, guest: Guest) -> Bytes | None:
    """Return the resident memory of the guest's QEMU process; None if libvirt does not report it.

    The result includes QEMU's own memory and the code that TCG has translated, but is limited to
    the guest's memory size. Raises HypervisorError.
    """

    def read(connection: libvirt.virConnect) -> dict[str, int]:
        return connection.lookupByUUIDString(guest.uuid).memoryStats()

    stats = await hypervisor.query("reading memory statistics", read)
    held = stats.get("rss")
    return None if held is None else Bytes(min(guest.memory, held * 1024))
