"""Protect guests: start, stop, fail over and test protections, and report their status."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.app import fleet, permission
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, GuestLocked, some
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, maintenance
from vmckpt.journal.records import Operation
from vmckpt.model.epoch_cost import Finder
from vmckpt.model.host import Host
from vmckpt.policy import select
from vmckpt.policy.select import Subject
from vmckpt.protection import active, adopt, agent_client, resync, start, stop, test_failover
from vmckpt.protection import status as protection_status
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.request import Judge, Protected, ProtectRequest, Setting
from vmckpt.protection.resync import Earlier
from vmckpt.protection.start import Told
from vmckpt.protection.stop import Known, StopResult
from vmckpt.protection.test_failover import TestedFailover
from vmckpt.scheduler import leases
from vmckpt.units import Seconds

_AT_ONCE = Seconds(1.0)
_ANSWERS = Seconds(8.0)
_NOTHING = ProtectionStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An operator's request to protect a guest."""

    guest: str
    to: str | None
    """The host for the standby; None with `reverse`: the host on which the guest ran before."""
    policy: str | None
    """Name of a policy; None: the policy that is selected for the guest."""
    wishes: Mapping[str, Any]
    """Overrides for fields of policy.model.Protection."""
    storage: str | None
    dry_run: bool
    finder: Finder | None = None
    """The method for finding changed pages; None: the best method that works for the guest."""
    reverse: bool = False
    """Whether the standby reuses the images that the guest left on its former host."""


async def protect(controller: Controller, request: Request, told: Told) -> Protected:
    """Protect a guest; see protection.start.protect. Finds the guest's host and its policy.

    Raises ReadOnly, BadInput, Blocked, GuestLocked, HostUnreachable, and the errors of
    protection.start.protect.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if not request.dry_run:
        permission.require(inventory, "protect", guest=request.guest)
    found, _ = await asyncio.gather(fleet.guests(inventory), asyncio.to_thread(jobs.load))
    primary = fleet.host_of(inventory, request.guest, found)
    guest = next(
        one for host, one in found[0]
        if host.name == primary.name and request.guest in (one.name, one.uuid)
    )  # fmt: skip
    earlier = _earlier(guest.uuid, primary.name) if request.reverse else None
    backup = inventory.host(_to(request, earlier, primary.name))
    await asyncio.to_thread(maintenance.refuse, backup.name)
    subject = Subject(
        guest=guest.name, guest_labels=guest.labels, host_labels=primary.labels,
        memory=guest.memory,
    )  # fmt: skip
    chosen = select.choose(policies, subject, request.policy).policy
    asked = ProtectRequest(
        guest=request.guest, to=backup.name, storage=request.storage, dry_run=request.dry_run,
        terms=replace(chosen.protection, **request.wishes), reverse=request.reverse,
        earlier=earlier, finder=request.finder,
    )  # fmt: skip
    setting = Setting(primary=primary, backup=backup, lease=inventory.lease)
    return await start.protect(setting, asked, caller, told)


def _earlier(uuid: str, host: str) -> Earlier | None:
    """Return the protection that moved a guest (a UUID) to its host, or None if unknown.

    Raises GuestLocked if the guest is protected.
    """
    with jobs.open_journal() as journal:
        found = [one for one in journal.recent(uuid, 0.0) if one.kind == active.KIND]
        if busy := next((one for one in found if one.active), None):
            raise GuestLocked(
                f"guest {busy.guest} is protected ({busy.id}); nothing was changed",
                hint=f"if the guest has failed over, run vmckpt recover; otherwise, run"
                f" vmckpt unprotect {busy.guest}",
            )
        return resync.earlier(((one, journal.steps(one.id)) for one in found), host)


def _to(request: Request, earlier: Earlier | None, host: str) -> str:
    """Return the host for the standby. Raises BadInput."""
    if earlier is not None and request.to not in (None, earlier.host):
        raise BadInput(
            f"guest {request.guest} ran on {earlier.host} before, not on {request.to}",
            hint="omit --to; or omit --reverse, to copy the disks completely",
        )
    if earlier is not None:
        return earlier.host
    if request.to is not None:
        return request.to
    what = f"the journal contains no protection that moved {request.guest} to {host}"
    raise BadInput(
        what if request.reverse else f"no host was given for the standby of {request.guest}",
        hint=f"run vmckpt protect {request.guest} --to HOST",
    )


async def unprotect(
    controller: Controller, guest: str, *, lost_journal: bool = False
) -> StopResult:
    """End a guest's protection; see protection.stop.unprotect.

    `lost_journal`: if the journal does not contain the protection, adopt it from its hosts. Raises
    ReadOnly, BadInput if the guest is not protected, and the errors of protection.stop.unprotect.
    """
    inventory, caller = controller.inventory, controller.caller
    command = "unprotect --lost-journal" if lost_journal else "unprotect"
    permission.require(inventory, command, guest=guest)
    known = await _known(controller, guest, lost_journal=lost_journal)
    return await stop.unprotect(known, caller)


async def _known(
    controller: Controller, guest: str, *, lost_journal: bool, dead: bool = False
) -> Known:
    """Return a guest's protection from the journal.

    `lost_journal`: if the journal does not contain the protection, adopt it from its hosts; see
    protection.adopt. `dead`: the operator states that the guest's host is off. Raises VmckptError.
    """
    inventory, caller = controller.inventory, controller.caller
    if not lost_journal:
        return active.of(inventory, guest)
    if (known := active.find(inventory, guest)) is not None:
        return known
    found, errors = await fleet.guests(inventory)
    uuids = {one.uuid for _, one in found if guest in (one.name, one.uuid)}
    if len(uuids) != 1:
        silent = f"; no answer from {some(errors)}" if errors else ""
        raise BadInput(f"guest {guest} is not protected{silent}", hint="run vmckpt status")
    return await adopt.adopt(inventory, guest, uuids.pop(), caller.warn, dead=dead)


async def failover(
    controller: Controller, guest: str, *, planned: bool = False, dead: bool = False,
    fence: bool = False, lost_journal: bool = False,
) -> StopResult:  # fmt: skip
    """Fail a guest over to its standby; see protection.stop.

    `planned`, `dead` and `fence` are mutually exclusive. `lost_journal` adopts the protection from
    its hosts, and is allowed only with `dead`. Raises ReadOnly, BadInput if the guest is not
    protected, and the errors of protection.stop.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "failover --planned" if planned else "failover", guest=guest)
    known = await _known(controller, guest, lost_journal=lost_journal, dead=dead)
    if planned:
        return await stop.planned(known, caller)
    return await stop.failover(known, caller, dead=dead, fence=fence)


async def test(controller: Controller, guest: str) -> TestedFailover:
    """Start a test failover of a guest; see protection.test_failover.begin.

    Raises ReadOnly, BadInput if the guest is not protected, and the errors of that function.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "failover --test", guest=guest)
    return await test_failover.begin(active.of(inventory, guest), caller)


async def end_test(controller: Controller, guest: str) -> TestedFailover:
    """End a guest's test failover; see protection.test_failover.end.

    Raises ReadOnly, BadInput if the guest is not protected, and the errors of that function.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "failover --end-test", guest=guest)
    return await test_failover.end(active.of(inventory, guest), caller)


async def status(inventory: Inventory, guest: str | None) -> Sequence[dict[str, Any]]:
    """Return the status of a guest's protection, or of all protections.

    An entry contains what the journal and both agents report. Raises BadInput if `guest` is not
    protected, and JournalError.
    """
    found = [one for one in active.active() if guest in (None, one.guest, one.guest_uuid)]
    if guest is not None and not found:
        raise BadInput(f"guest {guest} is not protected", hint="run vmckpt status")
    told = await asyncio.gather(*(job_status(inventory, one) for one in found))
    if any(one["judge"] == Judge.WATCH for one in told):
        kept = await asyncio.to_thread(_watch_is_kept)
        told = [
            {**one, "watch_is_kept": kept} if one["judge"] == Judge.WATCH else one for one in told
        ]
    return told


def _watch_is_kept() -> bool:
    """Return whether a service runs the failure detector, and is not known to be dead."""
    with jobs.open_journal(read_only=True) as journal:
        holder = journal.holder(leases.lease_of(leases.VIGIL))
        return holder is not None and jobs.attended(journal, holder) is not False


async def job_status(
    inventory: Inventory, operation: Operation, *, at_once: bool = False
) -> dict[str, Any]:
    """Return the status of one protection.

    `at_once`: a host that does not accept a connection within one second, or does not answer within
    eight seconds, counts as unreachable. A host that is not in this inventory always counts as
    unreachable.
    """
    names = [name for name in (operation.source, operation.target) if name]
    hosts = {name: inventory.hosts[name] for name in names if name in inventory.hosts}
    silent = {
        name: agent_client.unreachable(f"{name} is not in the inventory")
        for name in names if name not in hosts
    }  # fmt: skip
    if at_once:
        takes = await asyncio.gather(*(_takes_calls(host) for host in hosts.values()))
        silent |= {
            name: agent_client.unreachable(f"{name} does not answer")
            for name, yes in zip(hosts, takes, strict=True)
            if not yes
        }
    asked = {name: host for name, host in hosts.items() if name not in silent}
    limit = _ANSWERS if at_once else None
    told = silent | await agent_client.both(asked, operation.guest_uuid or "", limit)
    if protection_status.has_taken_over(told.get(operation.target or "", _NOTHING)):
        # The primary is asked again, because its answer may be older than the failover.
        first = {name: host for name, host in asked.items() if name == operation.source}
        told |= await agent_client.both(first, operation.guest_uuid or "", limit)
    entry = {
        "guest": operation.guest, "uuid": operation.guest_uuid, "job": operation.id,
        "primary": operation.source, "backup": operation.target,
        "automatic": bool(operation.detail.get("automatic")),
        "judge": operation.detail.get("judge"),
        "says": {name: told[name].told if name in told else None for name in names},
    }  # fmt: skip
    seen = protection_status.parse_status(entry)
    return {
        **entry, "standby": {"ready": seen.ready, "why": seen.ready_why},
        "end": seen.end, "next_step": seen.next_step,
    }  # fmt: skip


async def protection_summaries(
    inventory: Inventory, operations: Sequence[Operation]
) -> Mapping[str, dict[str, Any]]:
    """Return the status of several protections, by job; see `at_once` of `job_status`.

    Protections with a host that is not in the inventory are omitted.
    """
    found = [one for one in operations if {one.source, one.target} <= set(inventory.hosts)]
    told = await asyncio.gather(*(job_status(inventory, one, at_once=True) for one in found))
    return {operation.id: one for operation, one in zip(found, told, strict=True)}


async def _takes_calls(host: Host) -> bool:
    if host.ssh is None:
        return True
    try:
        async with asyncio.timeout(_AT_ONCE):
            _, writer = await asyncio.open_connection(host.ssh.address, host.ssh.port)
            writer.close()
            await writer.wait_closed()
    except OSError:
        return False
    return True
