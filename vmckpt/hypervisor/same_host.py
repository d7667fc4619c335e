"""Ask libvirt whether two names in the inventory refer to one host; see model.same_host."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.same_host import SameUuid, Sighting, judge

_KINDS = ("kernel", "user", "idle")
"""The CPU times that never decrease; "iowait" may."""
_TRIES = 3
"""Maximum number of comparisons: a single comparison can fail because guests start meanwhile."""


async def among(hosts: Sequence[Hypervisor]) -> tuple[SameUuid, ...]:
    """Compare all hosts, and return the pairs of names that have the same libvirt host UUID.

    The pairs of a host that does not answer are returned, too: their `one` is None.
    """
    seen = await asyncio.gather(*(_sighting(host) for host in hosts))
    found: list[SameUuid] = []
    distinct: list[int] = []
    for number, host in enumerate(hosts):
        pairs = [
            await _pair((hosts[other], host), (seen[other], seen[number])) for other in distinct
        ]
        same = [one for one in pairs if one is not None]
        found += same
        if not any(one.one for one in same):
            distinct.append(number)
    return tuple(found)


async def among_known(
    hosts: Iterable[Hypervisor], uuids: Mapping[str, str]
) -> tuple[SameUuid, ...]:
    """Compare the hosts that have the same libvirt host UUID; see `among`.

    `uuids`: the UUIDs that are known, by host.
    """
    times = Counter(uuids.values())
    return await among([one for one in hosts if times[uuids.get(one.host.name, "")] > 1])


async def _pair(
    hosts: tuple[Hypervisor, Hypervisor], seen: tuple[Sighting | str, Sighting | str]
) -> SameUuid | None:
    one, other = seen
    for answer in seen:
        if isinstance(answer, str):
            return _unknown(hosts, answer)
    assert isinstance(one, Sighting)
    assert isinstance(other, Sighting)
    return await _compare(*hosts) if one.uuid == other.uuid else None


async def _compare(one: Hypervisor, other: Hypervisor) -> SameUuid | None:
    """Compare two hosts whose UUIDs are the same; None if no host has a UUID."""
    same: SameUuid | None = None
    for _ in range(_TRIES):
        seen = []
        for host in (one, other, one):
            answer = await _sighting(host)
            if isinstance(answer, str):
                return _unknown((one, other), answer)
            seen.append(answer)
        same = judge((one.host.name, other.host.name), *seen)
        if same is None or same.one is not None:
            break
    return same


def _unknown(pair: tuple[Hypervisor, Hypervisor], why: str) -> SameUuid:
    return SameUuid(first=pair[0].host.name, second=pair[1].host.name, one=None, why=why)


async def _sighting(host: Hypervisor) -> Sighting | str:
    """Return what a host reports about itself, or, as a string, why the query failed."""
    try:
        return await host.query("reading the host's identity", _read)
    except HypervisorError as exc:
        return exc.message


def _read(connection: libvirt.virConnect) -> Sighting:
    try:
        cpu = connection.getCPUStats(libvirt.VIR_NODE_CPU_STATS_ALL_CPUS)
    except libvirt.libvirtError:  # not every driver provides statistics
        cpu = {}
    running = connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE)
    return Sighting(
        uuid=domain_xml.host_uuid(connection.getCapabilities()),
        hostname=domain_xml.text(connection.getHostname(), "the host's name"),
        running={one.UUIDString(): one.ID() for one in running},
        cpu={kind: domain_xml.count(cpu[kind], "CPU time") for kind in _KINDS if kind in cpu},
    )
