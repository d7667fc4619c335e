"""Create, list and restore snapshots of guests and of groups."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vmckpt.app import fleet
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, HostUnreachable, NotInStore, StoreError, at_host
from vmckpt.inventory import Inventory
from vmckpt.journal import location, maintenance
from vmckpt.model.disk import StorePlace
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.snapshot import catalog, create
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.group import create as group_create
from vmckpt.snapshot.group import restore as group_restore
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.create import GroupTaken
from vmckpt.snapshot.group.restore import GroupRestored
from vmckpt.snapshot.group.rules import GroupCompleteness
from vmckpt.snapshot.request import Restored, RestoreRequest, Taken, TakeRequest
from vmckpt.snapshot.restore import restore as restore_restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.snapshot.verify import results
from vmckpt.snapshot.verify.results import UNKNOWN, VerifySummary
from vmckpt.store import repository, snapshot_list
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.format import manifest
from vmckpt.store.format.metadata import Public
from vmckpt.store.keys.keyring import FOLDER, Keyring
from vmckpt.store.repository import Store

_CACHE = "cache"
FoundGuests = tuple[Sequence[tuple[Host, Guest]], Mapping[str, str]]
"""The result of fleet.guests: guests with their hosts, and errors by host."""


def keyring() -> Keyring:
    """Return the keys of this controller."""
    return Keyring(_state() / FOLDER)


def _state() -> Path:
    return location.state_folder(os.environ, root=os.geteuid() == 0)


def open_place(where: StorePlace) -> Store:
    """Open a store of the inventory. Raises NotInStore, StoreNewer, StoreError."""
    return repository.opened(where, cache=_state() / _CACHE)


def init(inventory: Inventory, name: str | None) -> str:
    """Create a store of the inventory. Returns its location.

    Raises ReadOnly, InventoryError, StoreError, and BadInput if the store exists.
    """
    inventory.may_act()
    store = Store.create(backend_of(inventory.store(name).url))
    return store.backend.where


async def take(controller: Controller, store: str | None, request: TakeRequest) -> Taken:
    """Take a snapshot of a guest on the host that has the guest; see snapshot.create.take.

    Raises ReadOnly, InventoryError, and the errors of `find` and snapshot.create.take.
    """
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    kept_in = inventory.store(store)
    found = find(inventory, request.guest, await fleet.guests(inventory))
    return await create.take(found, kept_in, keyring(), request, caller, hosts=inventory.hosts)


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
    raise fleet.no_guest(inventory, guest, found)


async def restore(
    controller: Controller,
    store: str | None,
    request: RestoreRequest,
    *,
    on: str | None,
    identity: Identity | None,
    closed_too: bool = False,
) -> Restored:
    """Restore a snapshot; see snapshot.restore.restore.

    `on`: the host; None: the host on which the snapshot was taken. `closed_too`: allow a host in
    maintenance, for a guest that is already there. Raises ReadOnly, NotInStore, StoreError,
    BadInput, Blocked if the host is in maintenance, and the errors of snapshot.restore.restore.
    """
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    opened = await asyncio.to_thread(opened_anywhere, inventory, store, request.snapshot, identity)
    host = inventory.host(on or opened.public.host)
    if not closed_too:
        await asyncio.to_thread(maintenance.refuse, host.name)
    return await restore_restore.restore(host, opened, request, caller, hosts=inventory.hosts)


def opened_anywhere(
    inventory: Inventory, name: str | None, word: str, identity: Identity | None
) -> Opened:
    """Open a snapshot in the named store, or in the first store that has it if `name` is None.

    If `name` is None, data that the store has lost is read from the other stores. Raises
    NotInStore, StoreError, BadInput.
    """
    places = list(inventory.stores.values()) or [inventory.store()]
    if name is not None:
        return opened_in(inventory.store(name), word, identity)
    found = catalog.find_anywhere(places, open_place, word)
    opened = opened_in(found.tiers[0].place, found.id, identity)
    # A store that lacks this snapshot may have another snapshot with the same chunks.
    others = tuple(one for one in places if one.name != opened.store.name)
    return replace(opened, others=others)


def opened_in(place_: StorePlace, word: str, identity: Identity | None) -> Opened:
    """Open a snapshot that a trusted writer signed. Raises NotInStore, StoreError, BadInput."""
    store = open_place(place_)
    trusted = keyring().trusted()
    id_ = catalog.find(store, word)
    found = manifest.decode(store.manifest(id_), id_, trusted)
    key = catalog.data_key(store, found, identity)
    return Opened(
        store=replace(place_, id=store.id), public=found.public, private=found.private(key),
        data_key=key, trusted=trusted,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A snapshot in the list of a store."""

    id: str
    public: Public | None
    """The snapshot's public metadata; None: the snapshot cannot be read."""
    pinned: bool
    trusted: bool
    """Whether the snapshot was signed by a writer that this controller trusts."""
    wrong: str | None
    """Why the snapshot cannot be read; None if it can be read."""
    group: GroupCompleteness | None = None
    """The snapshot's group, and how many members of the group the store has."""
    verdict: VerifySummary = UNKNOWN
    """Verification results of the snapshot."""


async def listed(
    inventory: Inventory, store: str | None, guest: str | None
) -> Sequence[SnapshotRow]:
    """List the snapshots of a store, the oldest first; unreadable snapshots come last.

    `guest`: list only snapshots of this guest, by name or UUID. Raises InventoryError, StoreError.
    """
    return await asyncio.to_thread(listing, inventory, store, guest)


def listing(
    inventory: Inventory, name: str | None, guest: str | None = None
) -> Sequence[SnapshotRow]:
    """List the snapshots of a store, blocking; see `listed`."""
    store = open_place(inventory.store(name))
    pins, trusted = store.pins(), keyring().trusted()
    found = []
    everything = []
    checks = results.verdicts(store, trusted)
    for id_, public in snapshot_list.proved(store).items():
        if not isinstance(public, Public):
            wrong = str(public)
            found.append(SnapshotRow(id=id_, public=None, pinned=False, trusted=False, wrong=wrong))
            continue
        everything.append(public)
        if guest is None or guest in (public.guest, public.guest_uuid):
            signed = bytes.fromhex(public.signer) in trusted
            found.append(
                SnapshotRow(
                    id=id_,
                    public=public,
                    pinned=id_ in pins,
                    trusted=signed,
                    wrong=None,
                    verdict=checks.get(id_, UNKNOWN),
                )
            )
    groups = rules.standing(everything)
    found = [
        replace(one, group=groups[one.public.group])
        if one.public is not None and one.public.group is not None
        else one
        for one in found
    ]
    return sorted(found, key=lambda one: (one.public is None, one.public and one.public.made_at))


async def take_group(
    controller: Controller,
    store: str | None,
    names: Sequence[str],
    request: TakeRequest,
) -> GroupTaken:
    """Create a snapshot of several guests at one instant; see snapshot.group.create.

    The guests may be on different hosts. Raises ReadOnly, BadInput, HostUnreachable, and the errors
    of snapshot.group.create.take.
    """
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    told = rules.check_names(names)
    kept_in = inventory.store(store)
    found = await fleet.guests(inventory)
    places = [find(inventory, name, found) for name in told]
    return await group_create.take(
        places, kept_in, keyring(), request, caller, hosts=inventory.hosts
    )


async def restore_group(
    controller: Controller,
    store: str | None,
    request: RestoreRequest,
    *,
    on: str | None,
    identity: Identity | None,
) -> GroupRestored:
    """Restore a group of snapshots (`request.snapshot` is its ID); see snapshot.group.restore.

    Raises ReadOnly, NotInStore if no store has the complete group, BadInput for options that do not
    apply to groups, Blocked if a host is in maintenance, and the errors of snapshot.group.restore.
    """
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    alone = {
        "--as": request.fork, "--folder": request.folder, "--link": request.link_up,
        "--lazy": request.lazy, "--on-restore": request.on_restore,
    }  # fmt: skip
    said = next((name for name, value in alone.items() if value), None)
    if said is not None:
        raise BadInput(f"{said} is not available for a group, and {request.snapshot} is a group")
    opened = await asyncio.to_thread(_opened, inventory, store, request.snapshot, identity)
    members = [(inventory.host(on or one.public.host), one) for one in opened]
    for host in {one.name for one, _ in members}:
        await asyncio.to_thread(maintenance.refuse, host)
    return await group_restore.restore(
        request.snapshot, members, request, caller, hosts=inventory.hosts
    )


def _opened(
    inventory: Inventory, name: str | None, id_: str, identity: Identity | None
) -> list[Opened]:
    """Open all snapshots of a group, and return them."""
    members = _members(inventory, name, id_)
    return [opened_anywhere(inventory, name, one.id, identity) for one in members]


def _members(inventory: Inventory, name: str | None, id_: str) -> Sequence[Public]:
    """Return the members of the group from the first store that has all members.

    Raises NotInStore, StoreError.
    """
    places = [inventory.store(name)] if name else list(inventory.stores.values())
    there = []
    for place in places or [inventory.store()]:
        try:
            told = catalog.readable(open_place(place)).values()
        except StoreError as exc:
            if len(places) < 2:
                raise
            there.append(f"{place.name} does not answer ({exc.message})")
            continue
        standing = rules.standing(told).get(id_)
        if standing is not None and standing.whole:
            return [one for one in told if one.group == id_]
        if standing is not None:
            there.append(f"{place.name}: {standing}")
    said = "; ".join([f"no store has the complete group {id_}", *there])
    raise NotInStore(said, hint="run vmckpt snapshot list")
