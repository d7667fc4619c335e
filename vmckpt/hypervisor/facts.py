"""What a host's libvirt says of the host, in one visit."""

from contextlib import suppress

import libvirt

from vmckpt.hypervisor import parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest, GuestState
from vmckpt.model.host import GuestOnHost, HostFacts
from vmckpt.units import Bytes


async def host_facts(hypervisor: Hypervisor) -> HostFacts:
    """Everything preflight and doctor want to know. Raises HostUnreachable or HypervisorError."""
    return await hypervisor.ask("asking about the host", _read)


def _read(connection: libvirt.virConnect) -> HostFacts:
    capabilities = connection.getCapabilities()
    machines, accelerators = parse.machines(capabilities)
    memory = connection.getMemoryStats(libvirt.VIR_NODE_MEMORY_STATS_ALL_CELLS)
    networks: set[str] = set()
    with suppress(libvirt.libvirtError):  # a host may run without the network driver
        networks = {
            network.name() for network in connection.listAllNetworks() if network.isActive()
        }
    return HostFacts(
        hostname=parse.text(connection.getHostname(), "the host's name"),
        uuid=parse.host_uuid(capabilities),
        libvirt_version=parse.version(connection.getLibVersion()),
        qemu_version=parse.version(connection.getVersion()),
        cpus=parse.count(connection.getInfo()[2], "the number of CPUs"),
        memory=_kib(memory["total"]),
        memory_free=_kib(parse.free(memory)),
        machines=machines,
        accelerators=accelerators,
        networks=frozenset(networks),
        guests=tuple(_guest(domain) for domain in connection.listAllDomains()),
    )


def _kib(number: int) -> Bytes:
    return Bytes(parse.count(parse.count(number, "memory") * 1024, "memory"))


def _guest(domain: libvirt.virDomain) -> GuestOnHost:
    state = GuestState.UNKNOWN
    with suppress(libvirt.libvirtError):
        state = parse.STATES.get(domain.state()[0], GuestState.UNKNOWN)
    return GuestOnHost(
        name=parse.text(domain.name(), "a guest's name"),
        uuid=parse.text(domain.UUIDString(), "a guest's UUID"),
        state=state,
    )


async def cpu_fits(hypervisor: Hypervisor, guest: Guest) -> bool | None:
    """Whether the host can give the guest its CPU; None if libvirt cannot tell."""
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

    return await hypervisor.ask("comparing CPUs", compare)
