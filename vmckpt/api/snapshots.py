"""The facade's part for snapshots."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt import api
from vmckpt.errors import BadInput, GuestBusy, HostUnreachable, KeyRefused, StoreError
from vmckpt.inventory import Inventory
from vmckpt.journal import place
from vmckpt.model.callers import Caller
from vmckpt.model.hosts import Host
from vmckpt.model.stores import StorePlace
from vmckpt.snapshot import keeping, restoring, taking
from vmckpt.snapshot.keeping import Identity
from vmckpt.snapshot.requests import Restored, RestoreRequest, Taken, TakeRequest
from vmckpt.snapshot.restoring import Opened
from vmckpt.store import manifest, wraps
from vmckpt.store.facts import Public
from vmckpt.store.keyring import FOLDER, Keyring
from vmckpt.store.places import backend_of
from vmckpt.store.store import Store


def keyring() -> Keyring:
    """The keys of this controller."""
    return Keyring(place.state_folder(os.environ, root=os.geteuid() == 0) / FOLDER)


def init(inventory: Inventory, name: str | None) -> str:
    """Make a store where the inventory says; where that is. Raises BadInput if it is there."""
    inventory.may_act()
    store = Store.create(backend_of(inventory.store(name).url))
    return store.backend.where


async def take(
    inventory: Inventory, store: str | None, request: TakeRequest, caller: Caller
) -> Taken:
    """Take a snapshot of a guest, wherever it runs; see snapshot.taking.take."""
    inventory.may_act()
    kept_in = inventory.store(store)
    host = await _host_of(inventory, request.guest)
    return await taking.take(host, kept_in, keyring(), request, caller, hosts=inventory.hosts)


async def _host_of(inventory: Inventory, guest: str) -> Host:
    """Where a guest runs. Raises BadInput, HostUnreachable."""
    found, errors = await api.guests(inventory)
    called = [(host, one) for host, one in found if guest in (one.name, one.uuid)]
    running = [(host, one) for host, one in called if one.state.is_active] or called
    if len(running) == 1:
        return running[0][0]
    if running:
        where = ", ".join(host.name for host, _ in running)
        raise BadInput(f"{guest} is on {where}", mend="name it by its UUID, or wait for its move")
    if errors:
        name, why = next(iter(errors.items()))
        raise HostUnreachable(
            f"no host that answers runs guest {guest}; not asked: {name} ({why})", host=name
        )
    raise BadInput(f"no guest {guest!r} on {', '.join(inventory.hosts)}", mend="run vmckpt guests")


async def restore(
    inventory: Inventory,
    store: str | None,
    request: RestoreRequest,
    caller: Caller,
    *,
    on: str | None,
    identity: Identity | None,
) -> Restored:
    """Bring a snapshot back, on the host it was taken on or another; see snapshot.restoring."""
    inventory.may_act()
    place_ = inventory.store(store)
    opened = await asyncio.to_thread(_opened, place_, request.snapshot, identity)
    host = inventory.host(on or opened.public.host)
    await _not_elsewhere(inventory, host, opened.public, request)
    return await restoring.restore(host, opened, request, caller)


def _opened(place_: StorePlace, word: str, identity: Identity | None) -> Opened:
    store = Store.open(backend_of(place_.url))
    trusted = keyring().trusted()
    id_ = keeping.find(store, word)
    found = manifest.decode(store.manifest(id_), id_, trusted)
    key = None
    if found.encrypted and identity is not None:
        wrapped = store.wraps(id_)
        if wrapped is None:
            raise KeyRefused(f"snapshot {id_} has lost its wrapped keys")
        key = wraps.unwrap(wrapped, id_, identity())
    return Opened(
        store=place_, public=found.public, private=found.private(key), data_key=key, trusted=trusted
    )


async def _not_elsewhere(
    inventory: Inventory, host: Host, public: Public, request: RestoreRequest
) -> None:
    """A guest never runs twice: all hosts are asked. Raises GuestBusy, HostUnreachable."""
    if request.fork is not None:
        return
    found, errors = await api.guests(inventory)
    for other, guest in found:
        if guest.uuid == public.guest_uuid and guest.state.is_active and other != host:
            raise GuestBusy(
                f"{guest.name} runs on {other.name}; nothing was changed",
                mend=f"restore it there with --on {other.name}, or as another guest with --as",
            )
    if errors:
        name, why = next(iter(errors.items()))
        raise HostUnreachable(
            f"{public.guest} may run on {name}, which does not answer ({why}); nothing was changed",
            host=name,
            mend="mend that host, or restore it as another guest with --as",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A snapshot as its store tells it."""

    id: str
    public: Public | None
    """None: it cannot be read."""
    pinned: bool
    trusted: bool
    """It was signed by a writer that is trusted here."""
    wrong: str | None


async def listed(inventory: Inventory, store: str | None, guest: str | None) -> Sequence[Listed]:
    """The snapshots of a store, the oldest first; those that cannot be read, last."""
    return await asyncio.to_thread(_listed, inventory, store, guest)


def _listed(inventory: Inventory, name: str | None, guest: str | None) -> Sequence[Listed]:
    store = Store.open(backend_of(inventory.store(name).url))
    pins, trusted = store.pins(), keyring().trusted()
    found = []
    for one in store.manifests():
        try:
            public = manifest.decode(store.manifest(one.id), one.id, None).public
        except StoreError as exc:
            found.append(
                Listed(id=one.id, public=None, pinned=False, trusted=False, wrong=str(exc))
            )
            continue
        if guest is None or guest in (public.guest, public.guest_uuid):
            signed = bytes.fromhex(public.signer) in trusted
            found.append(
                Listed(id=one.id, public=public, pinned=one.id in pins, trusted=signed, wrong=None)
            )
    return sorted(found, key=lambda one: (one.public is None, one.public and one.public.made_at))
