"""Read facts about a host from its libvirt: all facts once, or load and guests repeatedly.

A poll reads a guest's description again only if the guest's state has changed, or after a minute.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

import libvirt

from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor import domains as hypervisor_domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest, GuestNow, GuestState, HostNow
from vmckpt.model.host import GuestOnHost, HostFacts
from vmckpt.units import Bytes, Seconds


async def host_facts(hypervisor: Hypervisor) -> HostFacts:
    """Read the facts that preflight and doctor need. Raises HostUnreachable or HypervisorError."""
    return await hypervisor.query("reading facts about the host", _read)


def _read(connection: libvirt.virConnect) -> HostFacts:
    capabilities = connection.getCapabilities()
    machines, accelerators = domain_xml.machines(capabilities)
    memory = connection.getMemoryStats(libvirt.VIR_NODE_MEMORY_STATS_ALL_CELLS)
    networks: set[str] = set()
    with suppress(libvirt.libvirtError):  # a host may run without the network driver
        networks = {
            network.name() for network in connection.listAllNetworks() if network.isActive()
        }
    return HostFacts(
        hostname=domain_xml.text(connection.getHostname(), "the host's name"),
        uuid=domain_xml.host_uuid(capabilities),
        libvirt_version=domain_xml.version(connection.getLibVersion()),
        qemu_version=domain_xml.version(connection.getVersion()),
        cpus=domain_xml.count(connection.getInfo()[2], "the number of CPUs"),
        memory=_kib(memory["total"]),
        memory_free=_kib(domain_xml.free(memory)),
        machines=machines,
        accelerators=accelerators,
        networks=frozenset(networks),
        platforms=domain_xml.platforms(capabilities),
        guests=tuple(_guest(domain) for domain in connection.listAllDomains()),
    )


def _kib(number: int) -> Bytes:
    return Bytes(domain_xml.count(domain_xml.count(number, "memory") * 1024, "memory"))


def _guest(domain: libvirt.virDomain) -> GuestOnHost:
    state = GuestState.UNKNOWN
    with suppress(libvirt.libvirtError):
        state = domain_xml.STATES.get(domain.state()[0], GuestState.UNKNOWN)
    return GuestOnHost(
        name=domain_xml.text(domain.name(), "a guest's name"),
        uuid=domain_xml.text(domain.UUIDString(), "a guest's UUID"),
        state=state,
    )


async def cpu_fits(hypervisor: Hypervisor, guest: Guest) -> bool | None:
    """Return whether the host can provide the guest's CPU; None if unknown.

    Raises HostUnreachable or HypervisorError.
    """
    if guest.cpu_xml is None or guest.cpu_mode in (None, "host-passthrough", "maximum"):
        return None
    xml = guest.cpu_xml

    def compare(connection: libvirt.virConnect) -> bool | None:
        try:
            answer = connection.compareHypervisorCPU(
                None, guest.arch, None, guest.accelerator, xml, 0
            )
        except libvirt.libvirtError:
            return None
        return {
            libvirt.VIR_CPU_COMPARE_INCOMPATIBLE: False,
            libvirt.VIR_CPU_COMPARE_IDENTICAL: True,
            libvirt.VIR_CPU_COMPARE_SUPERSET: True,
        }.get(answer)

    return await hypervisor.query("comparing CPUs", compare)


_STALE = Seconds(60.0)
"""Age after which a guest's description is read again: labels, memory or CPUs may have changed."""


class HostPoller:
    """Polls the load and the guests of one host."""

    def __init__(self, hypervisor: Hypervisor) -> None:
        self._hypervisor = hypervisor
        self._known: dict[str, tuple[int, float, Guest]] = {}
        """By UUID: virDomainState value, monotonic time of the description, the description."""
        self._times: tuple[int, int] | None = None
        """CPU time since the host started, in nanoseconds: total and idle."""

    async def poll(self) -> tuple[HostNow, tuple[GuestNow, ...]]:
        """Return the host and its guests as they are now. Guests are sorted by name.

        Raises HostUnreachable or HypervisorError.
        """
        return await self._hypervisor.query("polling the host", self._read)

    def _read(self, connection: libvirt.virConnect) -> tuple[HostNow, tuple[GuestNow, ...]]:
        memory = connection.getMemoryStats(libvirt.VIR_NODE_MEMORY_STATS_ALL_CELLS)
        host = self._hypervisor.host
        now = HostNow(
            name=host.name,
            cpus=domain_xml.count(connection.getInfo()[2], "the number of CPUs"),
            busy=self._busy(connection),
            memory=Bytes(domain_xml.count(memory["total"], "memory") * 1024),
            free=Bytes(domain_xml.count(domain_xml.free(memory), "memory") * 1024),
            labels=host.labels,
        )
        found = self._guests(connection.listAllDomains())
        return now, tuple(_now(host.name, one) for one in found)

    def _busy(self, connection: libvirt.virConnect) -> float | None:
        try:
            stats = connection.getCPUStats(libvirt.VIR_NODE_CPU_STATS_ALL_CPUS)
        except libvirt.libvirtError:  # not every driver provides statistics
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
            with suppress(libvirt.libvirtError):  # the guest disappeared meanwhile
                uuid, state = domain.UUIDString(), hypervisor_domains.state_of(domain)[0]
                last = self._known.get(uuid)
                if last is None or last[0] != state or now - last[1] > _STALE:
                    last = (state, now, hypervisor_domains.described(domain))
                known[uuid] = last
        self._known = known
        return sorted((one for _, _, one in known.values()), key=lambda one: one.name)


def _now(host: str, guest: Guest) -> GuestNow:
    return GuestNow(
        name=guest.name, uuid=guest.uuid, host=host, state=guest.state, memory=guest.memory,
        vcpus=guest.vcpus, labels=guest.labels,
    )  # fmt: skip
