"""Fetch the facts that preflight checks, from both hosts concurrently."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from vmckpt.errors import HostKeyRefused, HypervisorError, RemoteError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor import host_facts as host_host_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import maintenance
from vmckpt.migration.plan.preflight import Facts
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.remote import probe
from vmckpt.remote.ssh import Remote

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
    seen = _SshFacts()
    if guest is not None and target_error is None:
        (cpu_fits, _), seen = await asyncio.gather(
            _or_error(host_host_facts.cpu_fits(target, guest)),
            _over_ssh(remotes, guest, target.host),
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
    )


async def _or_error(call: Awaitable[T]) -> tuple[T | None, str | None]:
    try:
        return await call, None
    except HypervisorError as exc:
        return None, exc.message


async def _over_ssh(remotes: Remotes | None, guest: Guest, target: Host) -> _SshFacts:
    """Check files and network links of the hosts, which requires ssh."""
    if remotes is None:
        return _SshFacts(login_error=_no_host(target))
    here, there = remotes
    on_file = [disk for disk in guest.disks if disk.kind == "file" and disk.source is not None]
    written = sorted({disk.source or "" for disk in on_file if not disk.read_only})
    below = {path for disk in guest.disks for path in disk.below}
    files = sorted({*guest.boot_files, *(disk.source or "" for disk in on_file), *below})
    # Shielded from cancellation: the probe file must be removed before the ssh login closes.
    same = asyncio.create_task(probe.same_files(here, there, sorted({*written, *below})))
    try:
        links, same_file, present, login, (post_copy, folder) = await asyncio.gather(
            probe.links(there),
            asyncio.shield(same),
            probe.present(there, files),
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
        on_target=present,
        login_error=login,
        post_copy_error=post_copy,
        post_copy_asked=True,
        memory_folder=folder,
    )


async def _peer_login(source: Remote, target: Host) -> str | None:
    """Return why the source's libvirtd cannot log in to the target's libvirtd; None if it can."""
    return _no_host(target) or await probe.peer_login(source, target.uri_for_peers)


def _no_host(target: Host) -> str | None:
    """Return why other hosts cannot use the target's address; None if they can."""
    if urlsplit(target.uri_for_peers).hostname:
        return None
    return f"{target.uri_for_peers} has no host name; set peer_uri of {target.name}"


@asynccontextmanager
async def logins(
    source: Hypervisor, target: Hypervisor, given: Remotes | None = None
) -> AsyncIterator[Remotes | None]:
    """Yield ssh logins to both hosts, opened on first use; None if a host has no ssh address."""
    if given is not None:
        yield given
        return
    if source.host.ssh is None or target.host.ssh is None or source.host.name == target.host.name:
        yield None
        return
    async with Remote(source.host) as here, Remote(target.host) as there:
        yield here, there
