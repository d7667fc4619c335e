"""Check that no other host runs a guest, and that no other guest uses its images."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vmckpt.errors import (
    GuestLocked,
    HostUnreachable,
    HypervisorError,
    run_doctor,
    silent_hosts,
)
from vmckpt.hypervisor import domains, storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.storage import User
from vmckpt.model.host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """The answer of one host."""

    host: str
    runs: bool = False
    """Whether the guest is active on the host."""
    users: Mapping[str, User] | None = None
    """Users of the images of the host's other guests, by path; None: the query failed."""
    error: str | None = None


async def query_hosts(hosts: Iterable[Host], uuid: str) -> list[HostAnswer]:
    """Query all hosts concurrently. If a query fails, the host's answer has the error."""

    async def one(host: Host) -> HostAnswer:
        async with Hypervisor(host) as hypervisor:
            try:
                guest = await domains.find_guest(hypervisor, uuid)
                runs = guest is not None and guest.state.is_active
                users = await storage.of_others(hypervisor, uuid)
                return HostAnswer(host=host.name, runs=runs, users=users)
            except HypervisorError as exc:
                return HostAnswer(host=host.name, error=exc.message)

    return list(await asyncio.gather(*(one(host) for host in hosts)))


def require_exclusive(
    heard: Iterable[HostAnswer], host: str, guest: str, images: Iterable[str]
) -> None:
    """Check that the original guest may be restored on `host`. Pure.

    `images` are the paths of its images. Raises GuestLocked if the guest is active on another host
    or another guest uses one of the images, and HostUnreachable if a host did not answer.
    """
    heard, mine = list(heard), set(images)
    for one in heard:
        if one.runs and one.host != host:
            raise GuestLocked(
                f"{guest} is running or paused on {one.host}; nothing was changed",
                hint=f"restore it there with --on {one.host}, or as another guest with --as",
            )
        for path in sorted(mine & set(one.users or {})):
            user = (one.users or {})[path].guest
            raise GuestLocked(
                f"{path} is also an image of guest {user} on {one.host}; nothing was changed",
                hint="restore the snapshot as another guest with --as",
            )
    silent = {one.host: one.error for one in heard if one.error is not None}
    if silent:
        raise HostUnreachable(
            f"{guest} may be running on a host that does not answer: {silent_hosts(silent)};"
            " nothing was changed",
            host=next(iter(silent)),
            hint=f"{run_doctor(silent)}, or restore the snapshot as another guest with --as",
        )


def image_users(heard: Iterable[HostAnswer]) -> dict[str, tuple[str, str]]:
    """Return, by path, the owner and the format of the images of other guests."""
    return {
        path: (f"{user.guest} on {one.host}", user.format)
        for one in heard
        for path, user in (one.users or {}).items()
    }
