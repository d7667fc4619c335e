"""A host at a glance, again and again: guests are only described when something is new of them."""

import time
from collections.abc import Sequence
from contextlib import suppress

import libvirt

from vmckpt.hypervisor import guests, parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest, GuestNow, HostNow
from vmckpt.units import Bytes, Seconds

_STALE = Seconds(60.0)
"""Labels, memory and CPUs may have been changed since."""


class Glancer:
    """Looks at one host."""

    def __init__(self, hypervisor: Hypervisor) -> None:
        self._hypervisor = hypervisor
        self._known: dict[str, tuple[int, float, Guest]] = {}
        """By UUID: libvirt's number for its state, when it was described, and how."""
        self._times: tuple[int, int] | None = None
        """Nanoseconds of CPU time since its start: all, and those without work."""

    async def look(self) -> tuple[HostNow, tuple[GuestNow, ...]]:
        """Raises HostUnreachable, HypervisorError."""
        return await self._hypervisor.ask("looking at the host", self._read)

    def _read(self, connection: libvirt.virConnect) -> tuple[HostNow, tuple[GuestNow, ...]]:
        memory = connection.getMemoryStats(libvirt.VIR_NODE_MEMORY_STATS_ALL_CELLS)
        host = self._hypervisor.host
        now = HostNow(
            name=host.name,
            cpus=parse.count(connection.getInfo()[2], "the number of CPUs"),
            busy=self._busy(connection),
            memory=Bytes(parse.count(memory["total"], "memory") * 1024),
            free=Bytes(parse.count(parse.free(memory), "memory") * 1024),
            labels=host.labels,
        )
        found = self._guests(connection.listAllDomains())
        return now, tuple(_now(host.name, one) for one in found)

    def _busy(self, connection: libvirt.virConnect) -> float | None:
        try:
            stats = connection.getCPUStats(libvirt.VIR_NODE_CPU_STATS_ALL_CPUS)
        except libvirt.libvirtError:  # not every driver counts
            return None
        idle = stats.get("idle", 0) + stats.get("iowait", 0)
        now, before = (sum(stats.values()), idle), self._times
        self._times = now
        if before is None or now[0] <= before[0]:
            return None
        return min(1.0, max(0.0, 1 - (now[1] - before[1]) / (now[0] - before[0])))

    def _guests(self, domains: Sequence[libvirt.virDomain]) -> list[Guest]:
        known: dict[str, tuple[int, float, Guest]] = {}
        now = time.monotonic()
        for domain in domains:
            with suppress(libvirt.libvirtError):  # it went away while we were reading
                uuid, state = domain.UUIDString(), guests.state_of(domain)[0]
                last = self._known.get(uuid)
                if last is None or last[0] != state or now - last[1] > _STALE:
                    last = (state, now, guests.described(domain))
                known[uuid] = last
        self._known = known
        return sorted((one for _, _, one in known.values()), key=lambda one: one.name)


def _now(host: str, guest: Guest) -> GuestNow:
    return GuestNow(
        name=guest.name, uuid=guest.uuid, host=host, state=guest.state, memory=guest.memory,
        vcpus=guest.vcpus, labels=guest.labels,
    )  # fmt: skip
