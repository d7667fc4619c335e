"""Protect guests: start, stop, fail over, and say how they stand."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.app import fleet
from vmckpt.app.controller import Controller
from vmckpt.app.snapshots import host_of
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, maintenance
from vmckpt.journal.records import Operation
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
    """What an operator asks for."""

    guest: str
    to: str | None
    """None: with `reverse`, where the guest was before."""
    policy: str | None
    """By name; None: the guest's own."""
    wishes: Mapping[str, Any]
    """Of policy.model.Protection, instead of the policy's."""
    storage: str | None
    dry_run: bool
    reverse: bool = False
    """The standby takes the images that the guest had there before."""


async def protect(controller: Controller, request: Request, told: Told) -> Protected:
    """See protection.start.protect; finds the guest's host, and the policy that is for it."""
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if not request.dry_run:
        inventory.may_act()
    found = await fleet.guests(inventory)
    primary = host_of(inventory, request.guest, found)
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
        earlier=earlier,
    )  # fmt: skip
    setting = Setting(primary=primary, backup=backup, lease=inventory.lease)
    return await start.protect(setting, asked, caller, told)


def _earlier(uuid: str, host: str) -> Earlier | None:
    """How a guest (a UUID) came to the host where it runs. Raises GuestLocked: it is protected."""
    with jobs.open_journal() as journal:
        found = [one for one in journal.recent(uuid, 0.0) if one.kind == active.KIND]
        if busy := next((one for one in found if one.active), None):
            raise GuestLocked(
                f"guest {busy.guest} is protected ({busy.id}); nothing was changed",
                hint=f"if it has failed over, vmckpt recover ends that; else vmckpt unprotect"
                f" {busy.guest}",
            )
        return resync.earlier(((one, journal.steps(one.id)) for one in found), host)


def _to(request: Request, earlier: Earlier | None, host: str) -> str:
    """Where the standby is to be. Raises BadInput."""
    if earlier is not None and request.to not in (None, earlier.host):
        raise BadInput(
            f"{request.guest} was on {earlier.host} before, and not on {request.to}",
            hint="leave --to out; or leave --reverse out, and all of its disks are copied",
        )
    if earlier is not None:
        return earlier.host
    if request.to is not None:
        return request.to
    what = f"nothing is known of a protection that brought {request.guest} to {host}"
    raise BadInput(
        what if request.reverse else f"no host for the standby of {request.guest}",
        hint=f"vmckpt protect {request.guest} --to HOST",
    )


async def unprotect(
    controller: Controller, guest: str, *, lost_journal: bool = False
) -> StopResult:
    """See protection.stop.unprotect, and `_known`."""
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    known = await _known(controller, guest, lost_journal=lost_journal)
    return await stop.unprotect(known, caller)


async def _known(
    controller: Controller, guest: str, *, lost_journal: bool, dead: bool = False
) -> Known:
    """A guest's protection as the journal has it. `lost_journal`: else as its hosts have it, see
    protection.adopt. Raises VmckptError."""
    inventory, caller = controller.inventory, controller.caller
    if not lost_journal:
        return active.of(inventory, guest)
    if (known := active.find(inventory, guest)) is not None:
        return known
    found, errors = await fleet.guests(inventory)
    uuids = {one.uuid for _, one in found if guest in (one.name, one.uuid)}
    if len(uuids) != 1:
        silent = f"; {' and '.join(errors)} cannot be asked" if errors else ""
        raise BadInput(f"{guest} is not protected{silent}", hint="vmckpt status lists them")
    return await adopt.adopt(inventory, guest, uuids.pop(), caller.warn, dead=dead)


async def failover(
    controller: Controller, guest: str, *, planned: bool = False, dead: bool = False,
    fence: bool = False, lost_journal: bool = False,
) -> StopResult:  # fmt: skip
    """See protection.stop, and `_known`. `planned` goes with neither of the others, nor `dead` with
    `fence`; `lost_journal` goes with `dead` alone."""
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    known = await _known(controller, guest, lost_journal=lost_journal, dead=dead)
    if planned:
        return await stop.planned(known, caller)
    return await stop.failover(known, caller, dead=dead, fence=fence)


async def test(controller: Controller, guest: str) -> TestedFailover:
    """See protection.test_failover.begin."""
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    return await test_failover.begin(active.of(inventory, guest), caller)


async def end_test(controller: Controller, guest: str) -> TestedFailover:
    """See protection.test_failover.end."""
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    return await test_failover.end(active.of(inventory, guest), caller)


async def status(inventory: Inventory, guest: str | None) -> Sequence[dict[str, Any]]:
    """How protections stand, one entry each: what the journal and both agents say."""
    found = [one for one in active.active() if guest in (None, one.guest, one.guest_uuid)]
    if guest is not None and not found:
        raise BadInput(f"{guest} is not protected", hint="run vmckpt status")
    told = await asyncio.gather(*(job_status(inventory, one) for one in found))
    if any(one["judge"] == Judge.WATCH for one in told):
        kept = await asyncio.to_thread(_watch_is_kept)
        told = [
            {**one, "watch_is_kept": kept} if one["judge"] == Judge.WATCH else one for one in told
        ]
    return told


def _watch_is_kept() -> bool:
    """Whether a service does, and lives."""
    with jobs.open_journal(read_only=True) as journal:
        holder = journal.holder(leases.lease_of(leases.VIGIL))
        return holder is not None and jobs.attended(journal, holder) is not False


async def job_status(
    inventory: Inventory, operation: Operation, *, at_once: bool = False
) -> dict[str, Any]:
    """How one of them stands. `at_once`: a host that does not take a call in a second, or
    does not answer in eight, is silent.

    One of its hosts may be in another inventory only.
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
            name: agent_client.unreachable(f"{name} is silent")
            for name, yes in zip(hosts, takes, strict=True)
            if not yes
        }
    asked = {name: host for name, host in hosts.items() if name not in silent}
    limit = _ANSWERS if at_once else None
    told = silent | await agent_client.both(asked, operation.guest_uuid or "", limit)
    if protection_status.has_taken_over(told.get(operation.target or "", _NOTHING)):
        # The guest's end here must not be older news than its beginning there.
        first = {name: host for name, host in asked.items() if name == operation.source}
        told |= await agent_client.both(first, operation.guest_uuid or "", limit)
    ready, why = protection_status.readiness(
        told.get(operation.source or "", _NOTHING), told.get(operation.target or "", _NOTHING)
    )
    return {
        "guest": operation.guest, "uuid": operation.guest_uuid, "job": operation.id,
        "primary": operation.source, "backup": operation.target,
        "automatic": bool(operation.detail.get("automatic")),
        "judge": operation.detail.get("judge"),
        "standby": {"ready": ready, "why": why},
        "says": {name: told[name].told if name in told else None for name in names},
    }  # fmt: skip


async def protection_summaries(
    inventory: Inventory, operations: Sequence[Operation]
) -> Mapping[str, dict[str, Any]]:
    """How they stand at once, by job; without those of hosts that the inventory does not have."""
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
