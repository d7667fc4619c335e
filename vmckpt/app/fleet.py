"""The hosts and guests of an inventory, and their labels."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vmckpt.app import permission
from vmckpt.errors import (
    BadInput,
    GuestLocked,
    HostUnreachable,
    HypervisorError,
    meant,
    run_doctor,
    silent_hosts,
    some,
)
from vmckpt.hypervisor import domains as hypervisor_domains
from vmckpt.hypervisor import host_facts as host_host_facts
from vmckpt.hypervisor import same_host as same_hosts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.model import same_host
from vmckpt.model.guest import Copies, Guest, two_copies
from vmckpt.model.host import Host, HostFacts
from vmckpt.model.same_host import SameUuid
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """A host and its facts, or the reason why it did not answer."""

    host: Host
    facts: HostFacts | None
    error: str | None


async def hosts(inventory: Inventory) -> tuple[list[HostView], tuple[SameUuid, ...]]:
    """Query all hosts in parallel. For a host that does not answer, the result has the error.

    Also returns the pairs of hosts that have the same UUID.
    """

    async def one(hypervisor: Hypervisor) -> HostView:
        host = hypervisor.host
        try:
            return HostView(
                host=host, facts=await host_host_facts.host_facts(hypervisor), error=None
            )
        except HypervisorError as exc:
            return HostView(host=host, facts=None, error=exc.message)

    async with _connected(inventory.hosts.values()) as hypervisors:
        views = list(await asyncio.gather(*(one(hypervisor) for hypervisor in hypervisors)))
        uuids = {view.host.name: view.facts.uuid for view in views if view.facts is not None}
        return views, await same_hosts.among_known(hypervisors, uuids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The guests of all hosts."""

    found: list[tuple[Host, Guest]]
    """The guests, each with its host. A host with two names is listed under the first name."""
    errors: Mapping[str, str]
    """The errors of the hosts that do not answer, by host."""
    same: tuple[SameUuid, ...] = ()
    """Hosts with guests in common that have the same UUID, or whose UUID is unknown."""


async def guests(
    inventory: Inventory, within: Seconds | None = None
) -> tuple[list[tuple[Host, Guest]], Mapping[str, str]]:
    """List the guests of all hosts, to find the host of a guest.

    `within`: time limit for each host, in seconds; None: no further limit. Returns the guests, each
    with its host, and the errors of the hosts that do not answer, by host. Raises InventoryError if
    a host with guests has, or may have, two names in the inventory.
    """
    found = await listing(inventory, within)
    same_host.require_distinct(found.same)
    return found.found, found.errors


async def listing(inventory: Inventory, within: Seconds | None = None) -> Listing:
    """List the guests of all hosts, and report hosts that have two names in the inventory.

    `within`: see `guests`.
    """

    async def one(hypervisor: Hypervisor) -> list[Guest] | str:
        try:
            async with asyncio.timeout(within):
                return await hypervisor_domains.all_guests(hypervisor)
        except HypervisorError as exc:
            return exc.message
        except TimeoutError:
            return "no answer in time"

    everyone = list(inventory.hosts.values())
    async with _connected(everyone) as hypervisors:
        answers = await asyncio.gather(*(one(hypervisor) for hypervisor in hypervisors))
        told = dict(zip(inventory.hosts, answers, strict=True))
        there = {
            name: {guest.uuid for guest in answer}
            for name, answer in told.items() if not isinstance(answer, str)
        }  # fmt: skip
        suspects = _with_common_guests(there)
        same = await same_hosts.among([one for one in hypervisors if one.host.name in suspects])
    hidden = same_host.left_out(same)
    found = [
        (host, guest) for host in everyone
        if host.name not in hidden and not isinstance(answer := told[host.name], str)
        for guest in answer
    ]  # fmt: skip
    errors = {name: answer for name, answer in told.items() if isinstance(answer, str)}
    return Listing(found=found, errors=errors, same=same)


@asynccontextmanager
async def _connected(hosts: Iterable[Host]) -> AsyncIterator[list[Hypervisor]]:
    """Provide connections to hosts, and close them concurrently, as a silent host takes seconds."""
    hypervisors = [Hypervisor(host) for host in hosts]
    try:
        yield hypervisors
    finally:
        await asyncio.gather(*(one.__aexit__() for one in hypervisors))


def _with_common_guests(there: Mapping[str, set[str]]) -> set[str]:
    """Return the hosts that have a guest in common with another host: one host, perhaps.

    `there`: UUIDs of the guests, by host.
    """
    times = Counter(uuid for uuids in there.values() for uuid in uuids)
    return {name for name, uuids in there.items() if any(times[uuid] > 1 for uuid in uuids)}


FoundGuests = tuple[Sequence[tuple[Host, Guest]], Mapping[str, str]]
"""The result of `guests`: guests with their hosts, and errors by host."""


def host_of(inventory: Inventory, guest: str, told: FoundGuests) -> Host:
    """Return the host of a guest. `told`: the hosts' answers. Raises BadInput, HostUnreachable."""
    return find(inventory, guest, told)[0]


def find(inventory: Inventory, guest: str, told: FoundGuests) -> tuple[Host, Guest]:
    """Return a guest and its host. `told`: the hosts' answers.

    Raises BadInput if no host or several hosts have the guest, HostUnreachable if the guest may be
    on a host that does not answer.
    """
    found, errors = told
    called = [(host, one) for host, one in found if guest in (one.name, one.uuid)]
    running = [(host, one) for host, one in called if one.state.is_active] or called
    if len(running) == 1:
        return running[0]
    if running:
        where = ", ".join(host.name for host, _ in running)
        raise BadInput(
            f"guest {guest} is on several hosts: {where}",
            hint="name the guest by its UUID, wait until its migration has ended, or undefine a"
            " copy that was left behind",
        )
    if errors:
        raise HostUnreachable(
            f"guest {guest} was not found on any host that answered; no answer from"
            f" {silent_hosts(errors)}",
            host=next(iter(errors)),
            hint=run_doctor(errors),
        )
    raise no_guest(inventory, guest, found)


async def copies(
    inventory: Inventory,
    found: Sequence[tuple[Host, Guest]] | None = None,
    within: Seconds | None = None,
) -> tuple[Copies, ...]:
    """Find guests that are running on two hosts.

    `found`: the guests that `listing` has just returned, if it was called. `within`: see
    `guests`. The hosts are queried again before a guest is reported, because a guest that moved
    during the first query may have been seen on both hosts. Raises InventoryError if it is unknown
    whether the two hosts are one host.
    """
    if found is None:
        found = (await listing(inventory, within)).found
    first = _copies(found)
    if not first:
        return ()
    again = await listing(inventory, within)
    known = {one.uuid for one in first}
    twice = tuple(one for one in _copies(again.found) if one.uuid in known)
    places = {host for one in twice for host in one.hosts}
    same_host.require_distinct([one for one in again.same if {one.first, one.second} <= places])
    return twice


def _copies(found: Sequence[tuple[Host, Guest]]) -> tuple[Copies, ...]:
    return two_copies((host.name, guest) for host, guest in found)


async def label(
    inventory: Inventory, guest: str, changes: Mapping[str, str | None]
) -> Mapping[str, str]:
    """Change labels of a guest; the value None removes a label. Returns the resulting labels.

    Raises ReadOnly or HypervisorError; GuestLocked if the guest is on two hosts or a job holds it;
    BadInput if no guest, or more than one, has this name.
    """
    permission.require(inventory, "label", guest=guest)
    found, errors = await guests(inventory)
    at = [(host, one) for host, one in found if guest in (one.name, one.uuid)]
    active = [(host, one) for host, one in at if one.state.is_active] or at
    if len(active) > 1 and len({one.uuid for _, one in active}) == 1:
        ends = " and ".join(host.name for host, _ in active)
        raise GuestLocked(
            f"guest {guest} is on {ends}: it is being migrated, or a copy was left behind;"
            " nothing was changed",
            hint="set the label after the migration has ended, or after virsh undefine has removed"
            " the copy that was left behind",
        )
    if len(active) != 1:
        where = f" (no answer from {some(errors)})" if errors else ""
        named = f"{len(active)} guests are" if active else "no guest is"
        raise BadInput(f"{named} named {guest}{where}", hint="run vmckpt guests")
    host, one = active[0]
    if one.locked:
        raise GuestLocked(
            f"guest {guest} on {host.name} is locked by a job: {one.job}; nothing was changed",
            hint="set the label after the job has ended",
        )
    kept = {**one.labels, **changes}
    labels = {name: value for name, value in kept.items() if value is not None}
    async with Hypervisor(host) as hypervisor:
        await hypervisor_domains.set_labels(hypervisor, one.uuid, labels)
    return labels


def no_guest(inventory: Inventory, name: str, found: Sequence[tuple[Host, Guest]]) -> BadInput:
    """Return the error for a guest that no host has; the hint lists similar names."""
    hint = meant(name, {guest.name for _, guest in found}, "run vmckpt guests")
    return BadInput(f"no guest {name!r} on {some(inventory.hosts, 10)}", hint=hint)
