"""How fast a guest writes, and how much memory it holds, as libvirt tells it."""

import asyncio
import math

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint
from vmckpt.units import GIB, MIB, Bytes, Seconds

# QEMU's default: pages looked at for each GiB of memory (migration/dirtyrate.h); libvirt has no way
# to ask for more.
_PAGES_PER_GIB = 512
_LONGEST = 60
_INTERVAL = Seconds(0.1)
# Beyond the time asked for, until it is an error.
_LATE = Seconds(5.0)


async def dirtied(hypervisor: Hypervisor, guest: Guest, seconds: int) -> DirtyPoint:
    """What the guest wrote within 1 to 60 seconds, by QEMU's page sampling.

    It works with and without KVM. The answer is rough: of 256 MiB it looks at 128 pages, and tells
    whole MiB/s. Raises HypervisorError, also if a job holds the guest: the two would be in each
    other's way.
    """
    seconds = min(_LONGEST, max(1, seconds))
    name = hypervisor.host.name
    now = await domains.find_guest(hypervisor, guest.uuid)
    if now is None or now.job is not None:
        why = "it is not there" if now is None else f"a job holds it: {now.job}"
        raise HypervisorError(f"{name}: writes of {guest.name} are not measured: {why}", host=name)

    def start(connection: libvirt.virConnect) -> None:
        connection.lookupByUUIDString(guest.uuid).startDirtyRateCalc(seconds, 0)

    def read(connection: libvirt.virConnect) -> dict[str, int | str]:
        domain = connection.lookupByUUIDString(guest.uuid)
        return connection.domainListGetStats([domain], libvirt.VIR_DOMAIN_STATS_DIRTYRATE)[0][1]

    await hypervisor.execute("starting to measure writes", start)
    await asyncio.sleep(seconds)
    late = 0.0
    while True:
        stats = await hypervisor.query("reading measured writes", read)
        if stats.get("dirtyrate.calc_status") == libvirt.VIR_DOMAIN_DIRTYRATE_MEASURED:
            rate = int(stats.get("dirtyrate.megabytes_per_second", 0))
            return point(rate, int(stats.get("dirtyrate.calc_period", seconds)), guest.memory)
        if late >= _LATE:
            raise HypervisorError(f"{name}: QEMU does not end measuring writes", host=name)
        await asyncio.sleep(_INTERVAL)
        late += _INTERVAL


def point(rate: int, seconds: int, memory: Bytes) -> DirtyPoint:
    """QEMU's whole MiB/s as bytes within that time.

    The error is two standard deviations of a share seen in so few pages, and the rounding.
    """
    found = min(float(memory), rate * MIB * float(seconds))
    pages = max(1.0, _PAGES_PER_GIB * memory / GIB)
    # One page more or less at both ends: a share of 0 among few pages is not surely 0.
    share = (found / memory * pages + 1) / (pages + 2)
    sampling = 2 * memory * math.sqrt(share * (1 - share) / pages)
    return DirtyPoint(
        time=Seconds(float(seconds)), dirtied=found, error=sampling + 0.5 * MIB * seconds
    )


async def resident(hypervisor: Hypervisor, guest: Guest) -> Bytes | None:
    """What the guest's QEMU process holds of the host's memory; None: libvirt does not say.

    That is more than the guest's own: QEMU's is in it, and TCG's translated code.
    """

    def read(connection: libvirt.virConnect) -> dict[str, int]:
        return connection.lookupByUUIDString(guest.uuid).memoryStats()

    stats = await hypervisor.query("reading memory statistics", read)
    held = stats.get("rss")
    return None if held is None else Bytes(min(guest.memory, held * 1024))
