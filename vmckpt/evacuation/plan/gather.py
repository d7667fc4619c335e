"""Query all hosts concurrently for what a plan needs."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType, TracebackType

from vmckpt.errors import HypervisorError, RemoteError
from vmckpt.evacuation.plan import inventory
from vmckpt.evacuation.plan.inventory import Answers, Look, Protected
from vmckpt.hypervisor import domains
from vmckpt.hypervisor import host_facts as host_host_facts
from vmckpt.hypervisor import same_host as same_hosts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.model import same_host
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.remote import probe
from vmckpt.remote.ssh import Remote

_AT_ONCE = 8


class Hosts:
    """Connections to hosts, open within an `async with` block."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)
        self._stack = AsyncExitStack()
        self._libvirt: dict[str, Hypervisor] = {}
        self._ssh: dict[str, Remote] = {}
        self._idle: dict[str, list[Remote]] = {}
        self._narrow = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> "Hosts":
        for host in self._hosts:
            self._libvirt[host.name] = await self._stack.enter_async_context(Hypervisor(host))
            if host.ssh is not None:
                self._ssh[host.name] = await self._stack.enter_async_context(Remote(host))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def logins(self, source: str, target: str) -> AsyncIterator[Remotes | None]:
        """Provide logins on both hosts for exclusive use; None if either host has no ssh login.

        Logins are kept for reuse, since a login costs more than all queries of preflight. Raises
        RemoteError.
        """
        if not {source, target} <= set(self._ssh):
            yield None
            return
        taken = [await self._taken(name) for name in (source, target)]
        try:
            yield taken[0], taken[1]
        finally:
            for one in taken:
                self._idle.setdefault(one.host.name, []).append(one)

    async def _taken(self, name: str) -> Remote:
        if idle := self._idle.get(name):
            return idle.pop()
        return await self._stack.enter_async_context(Remote(self._ssh[name].host))

    async def look(
        self, sources: Sequence[str], closed: Mapping[str, str], protected: Mapping[str, Protected]
    ) -> Answers:
        """Query all hosts. The answers include the hosts that do not answer, with the reason.

        `sources`: hosts whose guests may leave. Files of other hosts' guests are not compared.
        Raises InventoryError if two names are one host, whose memory would be counted twice.
        """
        looks = tuple(await asyncio.gather(*(self._look(one) for one in self._hosts)))
        uuids = {one.host.name: one.facts.uuid for one in looks if one.facts is not None}
        same_host.require_distinct(await same_hosts.among_known(self._libvirt.values(), uuids))
        leaving = {one.host.name: one.guests for one in looks if one.host.name in sources}
        fits, same = await asyncio.gather(self._fits(looks), self._same(leaving, looks))
        return Answers(looks=looks, fits=fits, same=same, closed=closed, protected=protected)

    async def _look(self, host: Host) -> Look:
        libvirt = self._libvirt[host.name]
        async with self._narrow:
            try:
                facts, found = await asyncio.gather(
                    host_host_facts.host_facts(libvirt), domains.all_guests(libvirt)
                )
            except HypervisorError as exc:
                return Look(host=host, error=exc.message)
            return Look(
                host=host, facts=facts, guests=tuple(found), links=await self._links(host.name)
            )

    async def _links(self, name: str) -> frozenset[str] | None:
        if name not in self._ssh:
            return None
        try:
            return await probe.links(self._ssh[name])
        except RemoteError:
            return None

    async def _fits(self, looks: Sequence[Look]) -> Mapping[str, frozenset[str]]:
        """Ask each host once whether it can offer each kind of CPU.

        Returns the CPUs that fit, by host.
        """
        kinds: dict[str, Guest] = {}
        for look in looks:
            for guest in look.guests:
                kinds.setdefault(inventory.cpu(guest), guest)
        open_ = [one for one in looks if one.error is None]
        found = await asyncio.gather(*(self._fitting(one, kinds) for one in open_))
        return MappingProxyType(
            {look.host.name: able for look, able in zip(open_, found, strict=True)}
        )

    async def _fitting(self, look: Look, kinds: Mapping[str, Guest]) -> frozenset[str]:
        able = set()
        for kind, guest in kinds.items():
            if look.facts is None or not look.facts.runs(guest.arch, guest.accelerator):
                continue
            try:
                if await host_host_facts.cpu_fits(self._libvirt[look.host.name], guest) is False:
                    continue
            except HypervisorError:
                continue
            able.add(kind)
        return frozenset(able)

    async def _same(
        self, leaving: Mapping[str, Sequence[Guest]], looks: Sequence[Look]
    ) -> Mapping[tuple[str, str], Mapping[str, bool]]:
        """Compare files between each pair of hosts that both have an ssh login.

        Returns, by source and target, whether the target sees each file; nothing for pairs of hosts
        that could not be compared.
        """
        pairs = [
            (source, look.host.name) for source in leaving for look in looks
            if source in self._ssh and look.host.name in self._ssh and look.error is None
            and look.host.name != source
        ]  # fmt: skip

        async def one(source: str, target: str) -> dict[str, bool]:
            wanted = sorted(
                {file for guest in leaving[source] for file in inventory.all_files(guest)}
            )
            try:
                return await probe.same_files(self._ssh[source], self._ssh[target], wanted)
            except RemoteError:
                return {}

        # One pair at a time: concurrent probes would find each other's files.
        found: dict[tuple[str, str], Mapping[str, bool]] = {}
        for pair in pairs:
            found[pair] = await one(*pair)
        # For pairs that could not be compared, libvirt decides.
        for source in leaving:
            for look in looks:
                found.setdefault((source, look.host.name), {})
        return MappingProxyType(found)
