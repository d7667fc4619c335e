"""The hosts and guests of an inventory, and their labels."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vmckpt.errors import (
    BadInput,
    GuestLocked,
    HostUnreachable,
    HypervisorError,
    at_host,
    meant,
)
from vmckpt.hypervisor import domains as hypervisor_domains
from vmckpt.hypervisor import host_facts as host_host_facts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.model.guest import Copies, Guest, two_copies
from vmckpt.model.host import Host, HostFacts
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """A host and its facts, or the reason why it did not answer."""

    host: Host
    facts: HostFacts | None
    error: str | None


async def hosts(inventory: Inventory) -> list[HostView]:
    """Query all hosts in parallel. For a host that does not answer, the result has the error."""

    async def one(host: Host) -> HostView:
        async with Hypervisor(host) as hypervisor:
            try:
                return HostView(
                    host=host, facts=await host_host_facts.host_facts(hypervisor), error=None
                )
            except HypervisorError as exc:
                return HostView(host=host, facts=None, error=exc.message)

    return list(await asyncio.gather(*(one(host) for host in inventory.hosts.values())))


async def guests(
    inventory: Inventory, within: Seconds | None = None
) -> tuple[list[tuple[Host, Guest]], Mapping[str, str]]:
    """List the guests of all hosts.

    `within`: time limit for each host, in seconds. Returns the guests, each with its host, and the
    errors of the hosts that do not answer, by host.
    """

    async def one(host: Host) -> list[Guest] | str:
        async with Hypervisor(host) as hypervisor:
            try:
                async with asyncio.timeout(within):
                    return await hypervisor_domains.all_guests(hypervisor)
            except HypervisorError as exc:
                return exc.message
            except TimeoutError:
                return "no answer in time"

    everyone = list(inventory.hosts.values())
    answers = await asyncio.gather(*(one(host) for host in everyone))
    found = [
        (host, guest)
        for host, answer in zip(everyone, answers, strict=True)
        if not isinstance(answer, str)
        for guest in answer
    ]
    errors = {
        host.name: answer
        for host, answer in zip(everyone, answers, strict=True)
        if isinstance(answer, str)
    }
    return found, errors


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
            hint="name the guest by its UUID, or wait until its migration has ended",
        )
    if errors:
        name, why = next(iter(errors.items()))
        raise HostUnreachable(
            f"guest {guest} was not found on any host that answered; no answer from"
            f" {at_host(name, why)}",
            host=name,
        )
    raise no_guest(inventory, guest, found)


async def copies(
    inventory: Inventory,
    found: Sequence[tuple[Host, Guest]] | None = None,
    within: Seconds | None = None,
) -> tuple[Copies, ...]:
    """Find guests that are running on two hosts.

    `found`: the guests that `guests` has just returned, if it was called. `within`: see
    `guests`. The hosts are queried again before a guest is reported, because a guest that moved
    during the first query may have been seen on both hosts.
    """
    if found is None:
        found, _ = await guests(inventory, within)
    first = _copies(found)
    if not first:
        return ()
    again, _ = await guests(inventory, within)
    known = {one.uuid for one in first}
    return tuple(one for one in _copies(again) if one.uuid in known)


def _copies(found: Sequence[tuple[Host, Guest]]) -> tuple[Copies, ...]:
    return two_copies((host.name, guest) for host, guest in found)


async def label(
    inventory: Inventory, guest: str, changes: Mapping[str, str | None]
) -> Mapping[str, str]:
    """Change labels of a guest; the value None removes a label. Returns the resulting labels.

    Raises ReadOnly or HypervisorError; GuestLocked if the guest is on two hosts or a job holds it;
    BadInput if no guest, or more than one, has this name.
    """
    inventory.may_act()
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
        where = f" (no answer from {', '.join(errors)})" if errors else ""
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
    return BadInput(f"no guest {name!r} on {', '.join(inventory.hosts)}", hint=hint)
