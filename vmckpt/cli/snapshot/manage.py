"""vmckpt snapshot pin, unpin, delete, prune, gc, copy, export and import."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt import units
from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.snapshot import inspect
from vmckpt.cli.snapshot.options import DRY_RUN, SNAPSHOT, SNAPSHOTS, STORE, YES, Ticker, sure
from vmckpt.errors import StoreDamaged
from vmckpt.units import Seconds, show_bytes, show_count

if TYPE_CHECKING:
    from vmckpt.app.snapshot_store import Pruning
    from vmckpt.snapshot.copy import Moved
    from vmckpt.snapshot.prune import PruneDecision
    from vmckpt.store.gc import Collected

_MOST = 100_000


def add_to(app: typer.Typer) -> None:
    """Add these commands, and those of `inspect`, to `app`."""
    inspect.add_to(app)
    for command in (pin, unpin, delete, prune, gc, copy, export):
        app.command()(command)
    app.command("import")(import_)


def pin(
    snapshot: SNAPSHOT,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Reason, to inform other users.")] = "",
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Protect a snapshot from delete and prune until it is unpinned.

    Example:

        vmckpt snapshot pin before-upgrade --why "until the audit is over"
    """
    from vmckpt.app import controller, snapshot_store

    id_ = snapshot_store.pin(controller.load_inventory(inventory), store, snapshot, why)
    _done({"id": id_, "pinned": True}, f"{id_} is pinned", json=json)


def unpin(
    snapshot: SNAPSHOT, store: STORE = None, inventory: INVENTORY = None, json: JSON = False
) -> None:
    """Unpin a snapshot, so that it can be deleted again.

    Example:

        vmckpt snapshot unpin before-upgrade
    """
    from vmckpt.app import controller, snapshot_store

    id_ = snapshot_store.unpin(controller.load_inventory(inventory), store, snapshot)
    _done({"id": id_, "pinned": False}, f"{id_} is no longer pinned", json=json)


def delete(
    snapshots: SNAPSHOTS,
    yes: YES = False,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Delete snapshots.

    No other snapshot depends on the deleted snapshots. To free their space, run vmckpt snapshot gc.

    Examples:

        vmckpt snapshot delete s-k3fq

        vmckpt snapshot delete before after --yes --json
    """
    from vmckpt.app import controller, snapshot_store

    doomed = snapshot_store.doomed(controller.load_inventory(inventory), store, snapshots)
    named = [
        f"{id_} ({doomed.known[id_].name} of {doomed.known[id_].guest})"
        if id_ in doomed.known
        else id_
        for id_ in doomed.ids
    ]
    sure(f"permanently delete {', '.join(named)}?", yes=yes)
    deleted = []
    for id_ in doomed.delete():
        deleted.append(id_)
        if not json:
            output.out.print(f"{id_} was deleted")
    if json:
        output.print_json({"deleted": deleted})


def prune(
    keep_last: Annotated[
        int, typer.Option(min=0, max=_MOST, help="Number of newest snapshots to keep.")
    ] = 0,
    keep_hourly: Annotated[
        int, typer.Option(min=0, max=_MOST, help="Number of hourly snapshots to keep.")
    ] = 0,
    keep_daily: Annotated[
        int, typer.Option(min=0, max=_MOST, help="Number of daily snapshots to keep.")
    ] = 0,
    keep_weekly: Annotated[
        int, typer.Option(min=0, max=_MOST, help="Number of weekly snapshots to keep.")
    ] = 0,
    keep_monthly: Annotated[
        int, typer.Option(min=0, max=_MOST, help="Number of monthly snapshots to keep.")
    ] = 0,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Schedule to prune; required if the store has several schedules."
        ),
    ] = None,
    dry_run: DRY_RUN = False,
    yes: YES = False,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Delete a schedule's snapshots that no rule keeps.

    For each guest, --keep-last keeps the N newest snapshots; each other rule keeps the newest
    snapshot from each of the last N hours, days, weeks or months that have a snapshot. The newest
    snapshot of each guest, pinned snapshots, and snapshots taken manually or by other
    schedules are always kept. The command shows for each snapshot why it is kept or deleted.

    Examples:

        vmckpt snapshot prune --keep-last 7 --keep-daily 14 --dry-run

        vmckpt snapshot prune --schedule nightly --keep-daily 7 --yes
    """
    from vmckpt.app import controller, snapshot_store
    from vmckpt.policy.model import Keep

    keep = Keep(
        last=keep_last,
        hourly=keep_hourly,
        daily=keep_daily,
        weekly=keep_weekly,
        monthly=keep_monthly,
    )
    found = snapshot_store.prune(
        controller.load_inventory(inventory), store, keep, schedule, dry_run=dry_run
    )
    going = [one.id for one in found.fates if not one.stays]
    if all(one.public is None or one.public.schedule != found.schedule for one in found.fates):
        output.say(f"warning: no snapshot in the store was made by schedule {found.schedule}")
    if not json:
        _print_fates(found)
    done: dict[str, PruneDecision] = {}
    if going and not dry_run:
        count = show_count(len(found.fates), "snapshot")
        sure(f"permanently delete {len(going)} of {count}?", yes=yes)
        for one in found.carry_out():
            done[one.id] = one
            output.say(f"{one.id} {'was deleted' if one.deleted else one.reasons[0]}")
    if json:
        output.print_json(
            {
                "schedule": found.schedule,
                "dry_run": dry_run,
                "snapshots": [done.get(one.id, one).as_json() for one in found.fates],
                "deleted": [one.id for one in done.values() if one.deleted],
            }
        )


def _print_fates(found: "Pruning") -> None:
    from vmckpt.snapshot.catalog import time_text

    table = output.table("snapshot", "name", "guest", "made (UTC)", "", "why")
    for one in found.fates:
        told = one.public
        table.add_row(
            one.id,
            "" if told is None else told.name,
            "" if told is None else told.guest,
            "" if told is None else time_text(told.made_at),
            output.styled("green", "keep") if one.stays else output.styled("bold red", "delete"),
            output.in_one_line("; ".join(one.reasons)),
        )
    output.out.print(table)
    going = sum(not one.stays for one in found.fates)
    output.out.print(f"schedule {found.schedule}: {going} of {len(found.fates)} to be deleted")


def _grace(text: str) -> Seconds:
    try:
        return units.parse_seconds(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None


def gc(
    grace: Annotated[
        Seconds | None,
        typer.Option(
            parser=_grace, metavar="TIME", help="Grace time before each step. Default: 24h."
        ),
    ] = None,
    dry_run: DRY_RUN = False,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Remove unneeded objects from a store.

    The command is safe to run while other commands use the store. Objects that no snapshot needs
    are removed in two steps, each after the grace time: a first run marks an object for deletion, a
    later run removes the object. If a restore may take longer than both grace times together, pin
    its snapshot.

    Examples:

        vmckpt snapshot gc --dry-run

        vmckpt snapshot gc --grace 12h --store far
    """
    from vmckpt.app import controller, snapshot_store
    from vmckpt.store.gc import GRACE

    known = controller.load_inventory(inventory)
    after = GRACE if grace is None else grace
    where, done = snapshot_store.collect(known, store, grace=after, dry_run=dry_run, say=output.say)
    if json:
        output.print_json(_collected_json(where, done, dry_run=dry_run))
    else:
        _print_collected(where, done, dry_run=dry_run)
    if done.missing or done.unreadable:
        raise StoreDamaged(
            f"{where}: {show_count(done.missing, 'missing chunk')} that snapshots need,"
            f" {show_count(len(done.unreadable), 'unreadable pack')}",
            hint="run vmckpt snapshot verify for details",
        )


def _collected_json(where: str, done: "Collected", *, dry_run: bool) -> dict[str, Any]:
    return {
        "store": where,
        "dry_run": dry_run,
        "removed": done.removed,
        "removed_bytes": done.removed_bytes,
        "marked": done.condemned,
        "marked_bytes": done.condemned_bytes,
        "condemned": done.condemned,
        "condemned_bytes": done.condemned_bytes,
        "rewritten": done.rewritten,
        "waiting": list(done.waiting),
        "dead_locks": done.dead_locks,
        "leftovers": done.leftovers,
        "missing_chunks": done.missing,
        "unreadable_packs": list(done.unreadable),
    }


def _print_collected(where: str, done: "Collected", *, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    output.out.print(
        f"{where}: {show_count(done.removed, 'object')} {would}removed"
        f" ({show_bytes(done.removed_bytes)}),"
        f" {done.condemned} {would}marked for deletion ({show_bytes(done.condemned_bytes)}),"
        f" {show_count(done.rewritten, 'pack')} {would}rewritten",
        soft_wrap=True,
    )
    if done.dead_locks or done.leftovers:
        output.out.print(
            f"left behind by killed commands: {show_count(done.dead_locks, 'lock')},"
            f" {show_count(done.leftovers, 'file')}"
        )
    for why in done.waiting:
        output.out.print(f"postponed: {why}", soft_wrap=True)


def copy(
    snapshots: SNAPSHOTS,
    to: Annotated[str, typer.Option(metavar="STORE", help="Target store, from the inventory.")],
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Copy snapshots to another store.

    No key is needed. Chunks that the target store already has are not written again. If the command
    was interrupted, run it again to continue.

    Examples:

        vmckpt snapshot copy before-upgrade --to far

        vmckpt snapshot copy s-k3fq s-m2aa --store far --to near --json
    """
    from vmckpt.app import controller, snapshot_store

    known = controller.load_inventory(inventory)
    moved = []
    for one in snapshot_store.copy(known, snapshots, store, to, Ticker().take):
        moved.append(one)
        if not json:
            _print_moved(one, to)
    if json:
        output.print_json([one.as_json() for one in moved])


def export(
    snapshot: SNAPSHOT,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file to write.")],
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Export a snapshot to a file.

    An encrypted snapshot stays encrypted. The file is a tar archive that contains a complete store
    (see docs/formats.md).

    Example:

        vmckpt snapshot export before-upgrade /mnt/stick/web1.vmckpt
    """
    from vmckpt.app import controller, snapshot_store

    known = controller.load_inventory(inventory)
    moved = snapshot_store.export(known, store, snapshot, file, Ticker().take)
    if json:
        told = moved.as_json()
        output.print_json(
            {name: told[name] for name in ("id", "name", "chunks", "encrypted")}
            | {"file": str(file), "bytes": moved.bytes_new}
        )
    else:
        output.out.print(
            f"{moved.id} {moved.name}: {moved.chunks} chunks, {show_bytes(moved.bytes_new)},"
            f" in {file}",
            soft_wrap=True,
        )


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File written by vmckpt snapshot export.")
    ],
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Import an exported snapshot into a store.

    The snapshot's writer must be trusted. No key is needed.

    Example:

        vmckpt snapshot import /mnt/stick/web1.vmckpt --store near
    """
    from vmckpt.app import controller, snapshot_store

    known = controller.load_inventory(inventory)
    place = known.store(store).name
    moved = snapshot_store.import_(known, store, file, Ticker().take)
    if json:
        output.print_json(moved.as_json() | {"store": place})
    else:
        _print_moved(moved, place)


def _print_moved(moved: "Moved", place: str) -> None:
    new = moved.chunks_new
    if moved.already:
        back = f"; restored {show_count(new, 'missing chunk')}" if new else ""
        output.out.print(f"{moved.id} {moved.name}: already in {place}{back}")
        return
    output.out.print(
        f"{moved.id} {moved.name}: stored in {place};"
        f" {new} of {show_count(moved.chunks, 'chunk')} new, {show_bytes(moved.bytes_new)}"
    )


def _done(told: dict[str, Any], line: str, *, json: bool) -> None:
    if json:
        output.print_json(told)
    else:
        output.out.print(line)
