"""Examine hosts, and prepare guests for snapshots and replication."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from vmckpt import recovery
from vmckpt.agent import client
from vmckpt.app import fleet, permission
from vmckpt.app.controller import Controller
from vmckpt.app.snapshot_store import open_store
from vmckpt.app.stores import keyring
from vmckpt.doctor import checks, gather
from vmckpt.doctor.checks import ControllerReady, StoreReady
from vmckpt.errors import VmckptError
from vmckpt.inventory import Inventory
from vmckpt.lease import replicas
from vmckpt.model.finding import Finding
from vmckpt.model.host import Host
from vmckpt.snapshot import prepare
from vmckpt.snapshot.prepare import Readiness


async def doctor(inventory: Inventory, names: Sequence[str]) -> tuple[Finding, ...]:
    """Examine the named hosts, or all hosts if `names` is empty.

    Returns all findings. Raises InventoryError.
    """
    chosen = [inventory.host(name) for name in names] or list(inventory.hosts.values())
    examined = await gather.examine(chosen, list(inventory.hosts.values()))
    now = datetime.now(UTC)
    found = tuple(finding for one in examined for finding in checks.check_host(one, now))
    if inventory.lease is not None:
        found = (*found, await asyncio.to_thread(replicas.examine, inventory.lease))
    if not inventory.stores:
        return found
    return (*found, *await findings(inventory, chosen))


async def findings(inventory: Inventory, hosts: Sequence[Host]) -> tuple[Finding, ...]:
    """Check whether hosts and this controller meet the requirements for snapshots.

    A host that does not answer is not an error; its findings are left out.
    """
    folders = {
        name: place.url for name, place in inventory.stores.items() if "://" not in place.url
    }
    asked = await asyncio.gather(
        *(gather.ask_host(host, folders, client.require_agent) for host in hosts)
    )
    own = await asyncio.to_thread(_controller, inventory)
    found = [one for host in asked if host is not None for one in checks.of_host(host)]
    return (*found, *checks.of_controller(own))


def _store(inventory: Inventory, name: str) -> StoreReady:
    try:
        opened = open_store(inventory, name)
        if not inventory.read_only:
            opened.backend.prove_locks()
    except VmckptError as exc:
        return StoreReady(wrong=exc.message, hint=exc.hint)
    return StoreReady(tried=not inventory.read_only)


def _controller(inventory: Inventory) -> ControllerReady:
    stores = {name: _store(inventory, name) for name in inventory.stores}
    try:
        admins = tuple(one.name for one in keyring().admins())
    except VmckptError as exc:
        return ControllerReady(stores=stores, admins=(), keys=exc.message)
    return ControllerReady(stores=stores, admins=admins, keys=None)


async def guest_readiness(controller: Controller, guest: str, *, live: bool = False) -> Readiness:
    """Determine what a guest lacks for snapshots and replication; see snapshot.prepare.readiness.

    Raises InventoryError, and the errors of `fleet.find` and snapshot.prepare.readiness.
    """
    inventory = controller.inventory
    host = fleet.host_of(inventory, guest, await fleet.guests(inventory))
    found = await prepare.readiness(host, guest, controller.caller, live=live)
    return await _with_lease_store(inventory, found)


async def make_ready(controller: Controller, guest: str, *, live: bool = False) -> Readiness:
    """Add missing elements to a guest's stored definition; see snapshot.prepare.make_ready.

    `live`: also replace network cards of the running guest. An interrupted replacement is finished
    first. Raises ReadOnly, and the errors of `guest_readiness` and snapshot.prepare.make_ready.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "prepare", guest=guest)
    if live:
        await recovery.recover_before(inventory, controller.policies, caller)
    host = fleet.host_of(inventory, guest, await fleet.guests(inventory))
    return await _with_lease_store(
        inventory, await prepare.make_ready(host, guest, caller, live=live)
    )


async def _with_lease_store(inventory: Inventory, found: Readiness) -> Readiness:
    """Return `found`, with the finding on the lease store if there is one: the lease store must be
    ready before a guest is replicated."""
    if inventory.lease is None:
        return found
    seen = await asyncio.to_thread(replicas.examine, inventory.lease)
    return replace(found, findings=(*found.findings, seen))
