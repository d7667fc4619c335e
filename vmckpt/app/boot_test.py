"""Verify snapshots by booting them."""

import asyncio
import time
from collections.abc import Callable, Sequence

from vmckpt.app import permission, snapshot_restore, stores
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, StoreError
from vmckpt.journal import controller_identity
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller
from vmckpt.snapshot import catalog
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.verify import boot_test, results
from vmckpt.snapshot.verify.boot_test import Booted
from vmckpt.snapshot.verify.results import Checked
from vmckpt.store.format.metadata import Contents
from vmckpt.units import Seconds


async def boot(
    controller: Controller, store: str | None, words: Sequence[str],
    *, on: str | None, folder: str | None, watch: Seconds, identity: Identity | None,
    each: Callable[[Booted], None],
) -> tuple[Booted, ...]:  # fmt: skip
    """Boot snapshots, one after the other, and call `each` with every result.

    `words`: the snapshots' IDs or names; empty: the newest snapshot with memory of every guest.
    `on`: name of the host; None: the host that took the snapshot. `folder`: directory for the test
    guests' images. `watch`: how long each test guest must run, in seconds. Returns the results.
    Raises ReadOnly, BadInput if a snapshot contains no memory, Cancelled, and the errors of
    restoring a snapshot.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "snapshot verify --boot")
    place = inventory.store(store)
    found = []
    for word in words or await asyncio.to_thread(_newest, place):
        opened = await asyncio.to_thread(snapshot_restore.opened_in, place, word, identity)
        if opened.public.contents is not Contents.MEMORY:
            raise BadInput(
                f"snapshot {opened.public.id} contains no memory, so --boot cannot test it",
                hint="restore the snapshot as a new guest with --as, and start the new guest",
            )
        host = inventory.host(on or opened.public.host)
        booted = await boot_test.boot(host, opened, folder, watch, caller)
        await asyncio.to_thread(_record, place, booted, caller)
        each(booted)
        found.append(booted)
    return tuple(found)


def _record(place: StorePlace, booted: Booted, caller: Caller) -> None:
    """Record the result beside the snapshot.

    If the store cannot be written, only a warning is printed: the snapshot itself may be intact.
    """
    keys = stores.keyring().signing()
    found = Checked(
        depth=results.BOOT, at=time.time(), good=booted.lives,
        what="" if booted.lives else booted.why, by=controller_identity.asked_by(),
        signer=keys.public.hex(),
    )  # fmt: skip
    try:
        results.record(stores.open_place(place), booted.snapshot, found, keys)
    except StoreError as exc:
        caller.warn(f"the result was not recorded: {exc}")


def _newest(place: StorePlace) -> list[str]:
    store = stores.open_place(place)
    newest: dict[str, tuple[float, str]] = {}
    for id_, public in catalog.readable(store).items():
        if public.contents is Contents.MEMORY:
            mine = (public.made_at, id_)
            newest[public.guest_uuid] = max(newest.get(public.guest_uuid, mine), mine)
    return [id_ for _, id_ in sorted(newest.values())]
