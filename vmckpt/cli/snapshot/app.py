"""vmckpt snapshot: the group of its commands, with init and list."""

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, help_alone
from vmckpt.cli.snapshot import browse, create, keys, manage, restore
from vmckpt.cli.snapshot.options import STORE
from vmckpt.units import Bytes, show_bytes

if TYPE_CHECKING:
    from vmckpt.app.snapshot_store import SnapshotRow

app = typer.Typer(name="snapshot", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def snapshot_options(context: typer.Context) -> None:
    """Take, verify, restore and manage snapshots.

    A snapshot contains a guest's memory, devices and disks. Snapshots are kept in a store of the
    inventory. They are deduplicated and, once you have added a key, encrypted.
    """
    help_alone(context)


@app.command()
def init(store: STORE = None, inventory: INVENTORY = None) -> None:
    """Create a snapshot store that the inventory defines.

    Examples:

        vmckpt snapshot init

        vmckpt snapshot init --store far
    """
    from vmckpt.app import controller, stores

    where = stores.init(controller.load_inventory(inventory), store)
    output.say(f"created store {where}")


@app.command("list")
def list_(
    guest: Annotated[
        str | None, typer.Argument(metavar="GUEST", help="Only snapshots of this guest.")
    ] = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """List the snapshots of a store.

    Examples:

        vmckpt snapshot list

        vmckpt snapshot list web1 --json
    """
    from vmckpt.app import controller, snapshot_store

    known = controller.load_inventory(inventory)
    found = asyncio.run(snapshot_store.listed(known, store, guest))
    if json:
        output.print_json([_as_json(one) for one in found])
        return
    table = output.table(
        "snapshot", "name", "guest", "made", ">memory", ">disks", ">new", "host, notes"
    )
    table.columns[0].no_wrap = table.columns[3].no_wrap = True
    for one in found:
        table.add_row(*_row(one))
    output.out.print(table)


_NAMES = (
    "id", "name", "guest", "guest_uuid", "contents", "made_at", "by", "host", "parent",
    "memory_bytes", "disks_bytes", "new_bytes", "encrypted", "pinned", "trusted", "tags",
    "verified", "group", "wrong",
)  # fmt: skip
"""The keys of a snapshot in --json output."""


def _row(one: "SnapshotRow") -> tuple[str, ...]:
    told = one.public
    if told is None:
        return (one.id, "", "", "", "", "", "", one.wrong or "")
    notes = [
        told.host,
        "pinned" if one.pinned else "",
        "" if one.trusted else "writer not trusted",
        "" if told.data_key_id else "not encrypted",
        "" if one.group is None else f"group {one.group}",
        "" if one.verdict.good is None else "verified" if one.verdict.good else "DAMAGED",
    ]
    made = datetime.fromtimestamp(told.made_at, UTC).strftime("%Y-%m-%d %H:%M")
    sizes = (show_bytes(Bytes(size)) for size in (told.memory, told.disks, told.new))
    return (
        one.id, told.name, told.guest, made, *sizes,
        ", ".join(note for note in notes if note),
    )  # fmt: skip


def _as_json(one: "SnapshotRow") -> dict[str, Any]:
    told = one.public
    if told is None:  # with the same keys, so that readers need only one format
        return dict.fromkeys(_NAMES) | {"id": one.id, "wrong": one.wrong}
    return {
        "id": one.id,
        "name": told.name,
        "guest": told.guest,
        "guest_uuid": told.guest_uuid,
        "contents": str(told.contents),
        "made_at": told.made_at,
        "by": told.by,
        "host": told.host,
        "parent": told.parent,
        "memory_bytes": told.memory,
        "disks_bytes": told.disks,
        "new_bytes": told.new,
        "encrypted": told.data_key_id is not None,
        "pinned": one.pinned,
        "trusted": one.trusted,
        "tags": dict(told.tags),
        "verified": one.verdict.as_json(),
        "group": None
        if one.group is None
        else {"id": one.group.id, "there": one.group.there, "of": one.group.size},
        "wrong": None,
    }


for part in (create, restore, browse, manage, keys):
    part.add_to(app)
