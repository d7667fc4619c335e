"""vmckpt snapshot: take, list, and keep."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from vmckpt import api
from vmckpt.api import snapshots
from vmckpt.api.snapshots import Listed
from vmckpt.cli import output, snapshot_keep, snapshot_keys
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.signals import stop_on_signals
from vmckpt.cli.snapshot_options import IDENTITY, STORE, identity_of
from vmckpt.model.events import Copied, Event
from vmckpt.snapshot.keeping import Identity
from vmckpt.snapshot.requests import Restored, RestoreRequest, Taken, TakeRequest
from vmckpt.units import Bytes, Seconds, show_bytes, show_seconds

app = typer.Typer(
    name="snapshot",
    help="Snapshots of memory and disks, in a store that can be proved.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_EVERY = Seconds(1.0)


@app.command()
def init(store: STORE = None, inventory: INVENTORY = None) -> None:
    """Make a store for snapshots, where the inventory says.

    Examples:

        vmckpt snapshot init

        vmckpt snapshot init --store far
    """
    where = snapshots.init(api.load_inventory(inventory), store)
    output.say(f"{where} is a store now")


@app.command()
def create(
    guest: Annotated[str, typer.Argument(help="Its name or UUID.")],
    name: Annotated[str | None, typer.Option(help="What it is called; else the time.")] = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Take a snapshot of a running guest.

    The guest stands still for some milliseconds only; its memory is read while it runs on. Ctrl-C
    gives it up: the guest is as it was, and nothing is in the store.

    Examples:

        vmckpt snapshot create web1

        vmckpt snapshot create web1 --name before-upgrade --json
    """
    known = api.load_inventory(inventory)
    request = TakeRequest(guest=guest, name=name)
    taken = asyncio.run(_create(known, store, request))
    if json:
        output.print_json(taken.as_json())
    else:
        _show_taken(taken)


async def _create(inventory: api.Inventory, store: str | None, request: TakeRequest) -> Taken:
    stop = stop_on_signals("stopping: the guest will be as it was")
    caller = api.Caller(emit=_Log().take, warn=output.say, stop=stop)
    return await snapshots.take(inventory, store, request, caller)


class _Log:
    """How far it is, a line a second."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def take(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Copied) and now - self._told >= _EVERY:
            self._told = now
            of = "" if event.total is None else f" of {show_bytes(event.total)}"
            new = f", {show_bytes(event.new)} new" if event.new else ""
            output.say(
                f"{now - self._began:7.1f}s {event.phase}: {show_bytes(event.done)}{of}{new}"
            )


def _show_taken(taken: Taken) -> None:
    for warning in taken.warnings:
        output.say(f"warning: {warning}")
    output.out.print(
        f"{taken.id} {taken.name}: {taken.guest} on {taken.host}, into {taken.store};"
        f" stood still for {show_seconds(taken.pause)}, done in {show_seconds(taken.took)}"
    )
    lock = "encrypted" if taken.encrypted else "not encrypted: no administrator's key is known"
    output.out.print(
        f"{show_bytes(taken.read)} read, {show_bytes(taken.same)} as before,"
        f" {show_bytes(taken.written)} written, {lock}"
    )


@app.command()
def restore(
    snapshot: Annotated[str, typer.Argument(help="Its id, or its name.")],
    on: Annotated[str | None, typer.Option(metavar="HOST", help="Else where it was taken.")] = None,
    as_: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="As another guest: a fork.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where a fork's disks go, on that host.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="A fork's network is on.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="End the guest if it runs: what it did since is lost.")
    ] = False,
    paused: Annotated[bool, typer.Option("--paused", help="It does not run yet.")] = False,
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Bring a guest back as it was: its disks and its memory.

    In its old place the guest must not run, or be ended with --replace. As a fork it is another
    guest, with a name, UUID and MACs of its own, and its network off unless --link is said.

    Examples:

        vmckpt snapshot restore s-n2jxhlfmmrfavwmo --replace

        vmckpt snapshot restore s-n2jxhlfmmrfavwmo --as web1-test --on beta
    """
    known = api.load_inventory(inventory)
    request = RestoreRequest(
        snapshot=snapshot, fork=as_, folder=folder, link_up=link, end_running=replace, paused=paused
    )
    key = identity_of(identity)
    done = asyncio.run(_restore(known, store, request, on, key))
    if json:
        output.print_json(done.as_json())
        return
    for warning in done.warnings:
        output.say(f"warning: {warning}")
    output.out.print(
        f"{done.guest} runs on {done.host}: disks written in {show_seconds(done.disks)},"
        f" memory loaded in {show_seconds(done.memory)}"
    )


async def _restore(
    inventory: api.Inventory,
    store: str | None,
    request: RestoreRequest,
    on: str | None,
    key: Identity | None,
) -> Restored:
    stop = stop_on_signals("stopping: nothing of it will be left")
    caller = api.Caller(emit=_Log().take, warn=output.say, stop=stop)
    return await snapshots.restore(inventory, store, request, caller, on=on, identity=key)


@app.command("list")
def list_(
    guest: Annotated[str | None, typer.Argument(help="Only of this one.")] = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """List the snapshots of a store.

    Examples:

        vmckpt snapshot list

        vmckpt snapshot list web1 --json
    """
    known = api.load_inventory(inventory)
    found = asyncio.run(snapshots.listed(known, store, guest))
    if json:
        output.print_json([_as_json(one) for one in found])
        return
    table = Table("snapshot", "name", "guest", "made", "host", "memory", "disks", "new", "")
    for one in found:
        table.add_row(*_row(one))
    output.out.print(table)


def _row(one: Listed) -> tuple[str, ...]:
    told = one.public
    if told is None:
        return (one.id, "", "", "", "", "", "", "", one.wrong or "")
    notes = [
        "pinned" if one.pinned else "",
        "" if one.trusted else "writer not trusted",
        "" if told.data_key_id else "not encrypted",
    ]
    made = datetime.fromtimestamp(told.made_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    sizes = (show_bytes(Bytes(size)) for size in (told.memory, told.disks, told.new))
    return (
        one.id, told.name, told.guest, made, told.host, *sizes,
        ", ".join(note for note in notes if note),
    )  # fmt: skip


def _as_json(one: Listed) -> dict[str, Any]:
    told = one.public
    if told is None:
        return {"id": one.id, "wrong": one.wrong}
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
        "wrong": None,
    }


snapshot_keep.add_to(app)
snapshot_keys.add_to(app)
