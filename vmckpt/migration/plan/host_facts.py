"""Fetch the facts that preflight checks, from both hosts concurrently."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlsplit

from vmckpt.definition.needs import Resource
from vmckpt.errors import HostKeyRefused, HypervisorError, RemoteError
from vmckpt.hypervisor import domains, dry_start, migration_source
from vmckpt.hypervisor import host_facts as host_host_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.migration_source import SourceAnswers
from vmckpt.journal import maintenance
from vmckpt.migration.plan import target_resources
from vmckpt.migration.plan.facts import Facts
from vmckpt.migration.plan.target_resources import TargetAnswers
from vmckpt.model.guest import Disk, Guest
from vmckpt.model.host import Host
from vmckpt.remote import probe
from vmckpt.remote.ssh import Remote
from vmckpt.remote.target_probe import TargetProbe, device_identities
from vmckpt.units import Bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SshFacts:
    links: frozenset[str] | None = None
    same_file: dict[str, bool] | None = None
    on_target: dict[str, bool] | None = None
    login_error: str | None = None
    post_copy_error: str | None = None
    post_copy_asked: bool = False
    memory_folder: str | None = None
    probed: TargetProbe | None = None
    errors: tuple[str, ...] = ()


Remotes = tuple[Remote, Remote]
"""Logins to source and target over ssh."""


async def gather(
    source: Hypervisor, target: Hypervisor, name: str, remotes: Remotes | None
) -> Facts:
    """Return all facts that could be determined about the guest and the hosts.

    Errors of libvirt and ssh become part of the facts, except HostKeyRefused, which is raised.
    """
    (
        (guest, guest_error),
        (source_facts, source_error),
        (target_facts, target_error),
        closed,
    ) = await asyncio.gather(
        _or_error(domains.find_guest(source, name)),
        _or_error(host_host_facts.host_facts(source)),
        _or_error(host_host_facts.host_facts(target)),
        asyncio.to_thread(maintenance.closed, target.host.name),
    )
    cpu_fits = None
    seen, answered, asked = _SshFacts(), TargetAnswers(), SourceAnswers()
    if guest is not None and guest.state.is_active:
        asked = (await _or_error(migration_source.ask_source(source, guest.uuid)))[0] or asked
    if guest is not None and target_error is None:
        volumes, _ = await _or_error(dry_start.volumes(target, asked.xml))
        guest = completed(guest, asked, volumes or {})
        (cpu_fits, _), answered, seen = await asyncio.gather(
            _or_error(host_host_facts.cpu_fits(target, guest)),
            target_resources.ask_libvirt(target, asked),
            _over_ssh(remotes, guest, target.host, asked.needs),
        )
    return Facts(
        name=name,
        source=source.host.name,
        target=target.host.name,
        guest=guest,
        source_facts=source_facts,
        source_error=source_error or guest_error,
        target_facts=target_facts,
        target_error=target_error,
        target_links=seen.links,
        same_file=seen.same_file or {},
        on_target=seen.on_target or {},
        cpu_fits=cpu_fits,
        peer_login_error=seen.login_error,
        post_copy_error=seen.post_copy_error,
        post_copy_asked=seen.post_copy_asked,
        memory_folder=seen.memory_folder,
        ssh_errors=seen.errors,
        target_closed=closed,
        needs=asked.needs,
        answers=target_resources.combine(
            asked.needs,
            answered.resources,
            seen.on_target or {},
            seen.probed,
            guest.memory if guest is not None else Bytes(0),
        ),
        blocked=asked.blocked,
        refused=answered.refused,
        checkpoints=asked.checkpoints,
    )


def completed(guest: Guest, source: SourceAnswers, volumes: Mapping[str, str]) -> Guest:
    """Return the guest with the paths of its volumes and data files. Pure.

    `volumes`: paths of the volumes on the target, by the disk's name in the guest.
    A volume that the target lacks, or has under another path, remains a volume, which cannot be
    compared.
    """

    def disk(one: Disk) -> Disk:
        path = source.volumes.get(one.target)
        if one.data_file is None and one.target in source.data_files:
            one = replace(one, data_file=source.data_files[one.target])
        if one.kind != "volume" or path is None or volumes.get(one.target) != path:
            return one
        return replace(one, kind="block" if path.startswith("/dev/") else "file", source=path)

    return replace(guest, disks=tuple(disk(one) for one in guest.disks))


async def _or_error(call: Awaitable[T]) -> tuple[T | None, str | None]:
    try:
        return await call, None
    except HypervisorError as exc:
        return None, exc.message


async def _over_ssh(
    remotes: Remotes | None, guest: Guest, target: Host, needs: Sequence[Resource]
) -> _SshFacts:
    """Check all that requires ssh: files, devices, network links, logins and post-copy.

    An error becomes part of the result, except HostKeyRefused, which is raised.
    """
    if remotes is None:
        return _SshFacts(login_error=_no_host(target))
    here, there = remotes
    wanted = _Files.of(guest)
    present = sorted({*wanted.all, *target_resources.paths(needs)})
    # Shielded from cancellation: the probe file must be removed before the ssh login closes.
    same = asyncio.create_task(_same(here, there, wanted))
    try:
        links, same_file, on_target, probed, login, post_copy = await asyncio.gather(
            probe.links(there),
            asyncio.shield(same),
            probe.present(there, present),
            target_resources.probe(there, needs),
            _peer_login(here, there.host),
            probe.post_copy(there),
        )
    except HostKeyRefused:
        raise
    except RemoteError as exc:
        return _SshFacts(errors=(str(exc),))
    finally:
        await asyncio.gather(same, return_exceptions=True)
    return _SshFacts(
        links=links,
        same_file=same_file,
        on_target=on_target,
        login_error=login,
        post_copy_error=post_copy[0],
        post_copy_asked=True,
        memory_folder=post_copy[1],
        probed=probed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files and devices of a guest's disks."""

    compared: list[str]
    """Files that are compared between the hosts."""
    devices: list[str]
    """Block devices that are compared between the hosts."""

    @property
    def all(self) -> frozenset[str]:
        return frozenset(self.compared) | frozenset(self.devices)

    @staticmethod
    def of(guest: Guest) -> "_Files":
        files: set[str] = set()
        devices: set[str] = set()
        for disk in guest.disks:
            files.update(disk.below)
            if disk.data_file is not None:
                files.add(disk.data_file)
            if disk.source is not None and disk.kind == "file":
                files.add(disk.source)
            elif disk.source is not None and disk.kind == "block":
                devices.add(disk.source)
        return _Files(compared=sorted(files), devices=sorted(devices))


async def _same(here: Remote, there: Remote, wanted: _Files) -> dict[str, bool]:
    """Return, by path, whether both hosts have the same file or block device.

    Unknown files and devices are left out. Raises RemoteError.
    """
    files, ours, theirs = await asyncio.gather(
        probe.same_files(here, there, wanted.compared),
        device_identities(here, wanted.devices),
        device_identities(there, wanted.devices),
    )
    known = [path for path in wanted.devices if None not in (ours[path], theirs[path])]
    return {**files, **{path: ours[path] == theirs[path] for path in known}}


async def _peer_login(source: Remote, target: Host) -> str | None:
    """Return why the source cannot log in to the target's libvirtd; None if no reason is known."""
    return _no_host(target) or await probe.peer_login(source, target.uri_for_peers)


def _no_host(target: Host) -> str | None:
    """Return why other hosts cannot use the target's address; None if it has a host name."""
    if urlsplit(target.uri_for_peers).hostname:
        return None
    return f"{target.uri_for_peers} has no host name; set peer_uri of {target.name}"


@asynccontextmanager
async def logins(
    source: Hypervisor, target: Hypervisor, given: Remotes | None = None
) -> AsyncIterator[Remotes | None]:
    """Yield ssh logins to both hosts, opened on first use, or the `given` logins.

    Yields None if a host has no ssh address, or if both hosts have the same name.
    """
    if given is not None:
        yield given
        return
    if source.host.ssh is None or target.host.ssh is None or source.host.name == target.host.name:
        yield None
        return
    async with Remote(source.host) as here, Remote(target.host) as there:
        yield here, there
