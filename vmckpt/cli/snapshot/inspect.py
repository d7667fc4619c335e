"""vmckpt snapshot show, diff and verify, also by booting."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, seconds
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import IDENTITY, SNAPSHOT, STORE, Ticker, identity_of
from vmckpt.errors import BadInput, StoreDamaged, StoreError
from vmckpt.units import Bytes, Seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.app.snapshot_store import Compared, Shown
    from vmckpt.snapshot.catalog import Identity
    from vmckpt.snapshot.verify.boot_test import Booted
    from vmckpt.snapshot.verify.repair import Repaired
    from vmckpt.snapshot.verify.verify import Proved
    from vmckpt.store.format.metadata import Public
    from vmckpt.store.format.private_part import Private


BOOT = Annotated[
    bool,
    typer.Option("--boot", help="Restore them beside the original, and see whether they live."),
]
ON = Annotated[str | None, typer.Option(metavar="HOST", help="Where; else where they were taken.")]
SCRATCH = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="For their disks, there; else beside the guest's."),
]
FOR = Annotated[
    Seconds | None,
    typer.Option("--for", parser=seconds, metavar="TIME", help="How long each is watched; 10s."),
]


def boot_all(
    inventory: "controller.Inventory", store: str | None, words: Sequence[str],
    key: "Identity | None", *, on: str | None, scratch: Path | None, watch: Seconds | None,
) -> "tuple[Booted, ...]":  # fmt: skip
    """Bring them to life, one after the other; without words the newest of every guest."""
    from vmckpt.app import boot_test, controller
    from vmckpt.snapshot.verify.boot_test import WATCH

    if scratch is not None and not scratch.is_absolute():
        raise BadInput(f"--scratch {scratch}: say the whole path, as that host sees it")

    async def run() -> "tuple[Booted, ...]":
        stop = stop_on_signals("stopping: the restored guest will be taken away")
        caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
        acting = controller.Controller(inventory=inventory, caller=caller)
        return await boot_test.boot(
            acting, store, words, on=on, folder=None if scratch is None else str(scratch),
            watch=watch or WATCH, identity=key, each=_say,
        )  # fmt: skip

    return asyncio.run(run())


def _say(one: "Booted") -> None:
    word = "lives" if one.lives else "does not live"
    output.say(f"{one.snapshot} {one.name}: {word} on {one.host}: {one.why}")


def check_booted(booted: "Sequence[Booted]") -> None:
    """Raises StoreDamaged if one of them did not come to life."""
    dead = [one for one in booted if not one.lives]
    if dead:
        more = f", and so are {len(dead) - 1} more" if len(dead) > 1 else ""
        raise StoreDamaged(
            f"{dead[0].snapshot} was restored on {dead[0].host}, and is dead: {dead[0].why}{more}",
            hint="look at an older snapshot, or at this one with --as and a console",
        )


def show_booted(booted: "Sequence[Booted]") -> None:
    """What came of them, in a line."""
    alive = sum(one.lives for one in booted)
    took = show_seconds(Seconds(sum(one.took for one in booted)))
    output.out.print(f"{alive} of {len(booted)} came to life, in {took}; nothing of it is left")


def add_to(app: typer.Typer) -> None:
    """Make these commands of `app`."""
    for command in (show, diff, verify):
        app.command()(command)


def show(
    snapshot: SNAPSHOT,
    identity: IDENTITY = None,
    xml: Annotated[bool, typer.Option("--xml", help="Print the guest's XML and no more.")] = False,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show what is known of a snapshot: without a key the public part, with one all of it.

    Examples:

        vmckpt snapshot show before-upgrade

        vmckpt snapshot show s-k3fq --identity ~/vmckpt.key --json

        vmckpt snapshot show s-k3fq --identity ~/vmckpt.key --xml > web1.xml
    """
    from vmckpt.app import controller, snapshot_store

    known = controller.load_inventory(inventory)
    found = snapshot_store.show(known, store, snapshot, identity_of(identity))
    if xml:
        output.out.print(found.open().facts.domain_xml, soft_wrap=True)
        return
    private, refused = None, None
    if identity is not None or not found.looked.found.encrypted:
        try:
            private = found.open()
        except StoreError as exc:
            refused = exc
    if json:
        inside = None if private is None else _inside_json(private)
        output.print_json(_public_json(found) | {"private": inside})
    else:
        _print_rows(_public_rows(found))
        if private is not None:
            _print_private(private)
    # What can be seen was shown: for whom it is is what one wants to know then.
    if refused is not None:
        raise refused


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="The older one.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The newer one.")],
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show how much of each region and disk differs between two snapshots.

    The figures are upper bounds: what was stored twice, as by a full snapshot, counts as changed.

    Examples:

        vmckpt snapshot diff s-k3fq s-m2aa --identity ~/vmckpt.key

        vmckpt snapshot diff monday tuesday --json
    """
    from vmckpt.app import controller, snapshot_store

    known = controller.load_inventory(inventory)
    found = snapshot_store.compare(known, store, (before, after), identity_of(identity))
    if found.before.guest_uuid != found.after.guest_uuid:
        output.say(f"warning: {found.before.guest} and {found.after.guest} are different guests")
    if json:
        output.print_json(found.as_json())
    else:
        _print_diff(found)


def verify(
    snapshots: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SNAPSHOT...]", help="Ids or names; else all of the store."),
    ] = None,
    sealed: Annotated[
        bool, typer.Option("--sealed", help="Use no private key, even if one is named.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every chunk, and see whether it fits its place.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Take away what is damaged first, and save the rest of it."),
    ] = False,
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="STORE", help="Bring back from there what is lost."),
    ] = None,
    boot: BOOT = False,
    on: ON = None,
    scratch: SCRATCH = None,
    watch: FOR = None,
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Prove that snapshots are whole; say all that is not, and end with exit code 41 then.

    Without a key: every bit of every object, signatures, and that nothing is missing. With one:
    also that snapshots open and name these chunks. --deep reads all of them, too. --boot restores
    each (without names the newest of every guest) as a guest of its own without network, watches
    whether it lives, and takes it away.

    Examples:

        vmckpt snapshot verify

        vmckpt snapshot verify before-upgrade --deep --identity ~/vmckpt.key

        vmckpt snapshot verify --sealed --store far --json

        vmckpt snapshot verify --repair --from far

        vmckpt snapshot verify before-upgrade --boot --on beta --scratch /srv/scratch
    """
    from vmckpt.app import controller, snapshot_store
    from vmckpt.snapshot.verify.verify import Depth

    if sealed and deep:
        raise BadInput("--deep reads what --sealed leaves closed", hint="say one of them")
    if boot and sealed:
        raise BadInput("--boot opens what --sealed leaves closed", hint="say one of them")
    if not boot and (on or scratch or watch):
        raise BadInput("--on, --scratch and --for are for --boot", hint="say --boot, too")
    if from_ and not repair:
        raise BadInput("--from is for mending", hint="say --repair, too")
    if repair and snapshots:
        raise BadInput("--repair mends all of a store", hint="name no snapshots with it")
    depth = Depth.SEALED if sealed else Depth.DEEP if deep else Depth.OPENED
    known = controller.load_inventory(inventory)
    key = None if sealed else identity_of(identity)
    mended = snapshot_store.repair(known, store, from_ or (), Ticker().take) if repair else None
    found = snapshot_store.verify(
        known, store, snapshots or (), depth, identity=key, progress=Ticker().take, warn=output.say
    )
    booted: tuple[Booted, ...] = ()
    if boot and not found.flaws:
        booted = boot_all(known, store, snapshots or (), key, on=on, scratch=scratch, watch=watch)
    if json:
        repaired = {} if mended is None else {"repaired": mended.as_json()}
        alive = {"booted": [one.as_json() for one in booted]} if boot else {}
        output.print_json(found.as_json() | repaired | alive)
    else:
        if mended is not None:
            _print_repaired(mended)
        _print_proof(found)
        if booted:
            show_booted(booted)
    found.check()
    check_booted(booted)


def _print_repaired(mended: "Repaired") -> None:
    output.out.print(
        f"repaired: {len(mended.removed)} damaged objects removed, {mended.saved} chunks saved from"
        f" them, {mended.brought} brought back ({show_bytes(mended.brought_bytes)})",
        soft_wrap=True,
    )
    for id_ in mended.snapshots:
        output.out.print(f"{id_}: brought back", soft_wrap=True)
    for id_, count in mended.lost.items():
        output.out.print(
            f"{id_}: {count} chunks are lost here; --from a store that has them", soft_wrap=True
        )


def _print_proof(found: "Proved") -> None:
    from vmckpt.snapshot.verify.verify import Depth

    for flaw in found.flaws:
        output.out.print(str(flaw), soft_wrap=True)
    opened = f", {found.opened} of them opened" if found.depth is not Depth.SEALED else ""
    read = f", {found.chunks} chunks read" if found.depth is Depth.DEEP else ""
    state = f"{len(found.flaws)} wrong" if found.flaws else "all whole"
    output.out.print(
        f"{found.where}: {found.snapshots} snapshots{opened}, {found.objects} objects,"
        f" {show_bytes(found.bytes)}{read}: {state}",
        soft_wrap=True,
    )
    if found.closed and found.depth is Depth.OPENED:
        output.say(f"not opened: {len(found.closed)}, for want of the right key")


def _print_rows(rows: list[tuple[str, str]]) -> None:
    shown = output.table("", "")
    shown.show_header = False
    for name, text in rows:
        shown.add_row(name, output.in_one_line(text))
    output.out.print(shown)


def _public_rows(found: "Shown") -> list[tuple[str, str]]:
    from vmckpt.snapshot.catalog import time_text
    from vmckpt.store.keys.key_files import fingerprint

    told = found.looked.public
    names = {one.fingerprint: one.name for one in found.admins}
    if found.looked.wrong is not None:
        keys = f"cannot be told: {found.looked.wrong}"
    else:
        keys = ", ".join(
            f"{names[one]} ({one})" if one in names else one for one in found.looked.keys
        )
    notes = [
        "pinned" if found.looked.pinned else "",
        "" if found.looked.trusted else "its writer is not trusted here",
    ]
    rows = [
        ("id", told.id),
        ("name", told.name),
        ("guest", f"{told.guest} ({told.guest_uuid})"),
        ("contents", str(told.contents)),
        ("made", f"{time_text(told.made_at)} UTC by {told.by} on {told.host}"),
        ("parent", told.parent or "none"),
        ("group", told.group or ""),
        ("memory", show_bytes(told.memory)),
        ("disks", show_bytes(told.disks)),
        ("new", f"{show_bytes(told.new)} in {len(found.looked.found.names)} chunks at most"),
        ("runs on", f"QEMU {told.qemu}, {told.machine}, {told.accelerator}, {told.arch}"),
        ("tags", ", ".join(f"{name}={value}" for name, value in told.tags.items())),
        ("opened by", keys if told.data_key_id else "everybody: it is not encrypted"),
        ("writer", fingerprint(bytes.fromhex(told.signer))),
        ("stores", ", ".join(found.stores)),
        ("verified", _verified(found)),
        ("", ", ".join(note for note in notes if note)),
    ]
    return [(name, text) for name, text in rows if text]


def _verified(found: "Shown") -> str:
    from vmckpt.snapshot.catalog import time_text

    last = found.verdict.last
    if last is None:
        return "never"
    wrong = f": {last.what}" if last.what else ""
    return f"{last}, {time_text(last.at)} UTC by {last.by}{wrong}"


def _public_json(found: "Shown") -> dict[str, Any]:
    from vmckpt.store.keys.key_files import fingerprint

    told: Public = found.looked.public
    fields = (
        "id", "name", "guest", "guest_uuid", "made_at", "by", "host", "parent", "group", "qemu",
        "machine", "accelerator", "arch", "epoch", "domain", "schedule",
    )  # fmt: skip
    return {name: getattr(told, name) for name in fields} | {
        "contents": str(told.contents),
        "memory_bytes": told.memory,
        "disks_bytes": told.disks,
        "new_bytes": told.new,
        "chunks": len(found.looked.found.names),
        "tags": dict(told.tags),
        "encrypted": found.looked.found.encrypted,
        "keys": list(found.looked.keys),
        "keys_wrong": found.looked.wrong,
        "writer": fingerprint(bytes.fromhex(told.signer)),
        "pinned": found.looked.pinned,
        "trusted": found.looked.trusted,
        "stores": list(found.stores),
        "verified": found.verdict.as_json(),
    }


def _inside_json(private: "Private") -> dict[str, Any]:
    facts = private.facts
    return {
        "regions": [
            {"name": one.name, "kind": str(one.kind), "bytes": one.size} for one in private.regions
        ],
        "disks": [
            {"target": one.target, "format": one.format, "bytes": one.size, "options": one.options}
            for one in facts.disks
        ],
        "files": {name: len(file) for name, file in private.files.items()},
        "boot_files": list(facts.boot_files),
        "agent": dict(facts.agent),
        "warnings": list(facts.warnings),
        "domain_xml": facts.domain_xml,
    }


def _print_private(private: "Private") -> None:
    facts = private.facts
    regions: Table = output.table("region", "kind", ">size")
    for one in private.regions:
        regions.add_row(one.name, str(one.kind), show_bytes(one.size))
    output.out.print()
    output.out.print(regions)
    if facts.disks:
        disks = output.table("disk", "format", ">size", "options")
        for disk in facts.disks:
            disks.add_row(
                disk.target, disk.format, show_bytes(disk.size), output.in_one_line(disk.options)
            )
        output.out.print()
        output.out.print(disks)
    rows = [("boots from", path) for path in facts.boot_files]
    rows += [("keeps", f"{name}, {len(file)} bytes") for name, file in private.files.items()]
    rows += [("agent", f"{name}: {value}") for name, value in facts.agent.items()]
    rows += [("warning", text) for text in facts.warnings]
    if rows:
        output.out.print()
        _print_rows(rows)


def _print_diff(found: "Compared") -> None:
    table = output.table("region", "kind", ">before", ">after", ">changed", ">to zeros", ">filled")
    for one in found.regions:
        unit = one.size // one.changed if one.changed else 0
        table.add_row(
            one.name,
            str(one.kind),
            _size(one.before),
            _size(one.after),
            f"{one.mib:.2f} MiB",
            show_bytes(one.zeroed * unit),
            show_bytes(one.filled * unit),
        )
    output.out.print(table)
    beside = "" if found.follows else "; the second was not made from the first"
    output.out.print(f"at most {show_bytes(found.changed)} changed{beside}")


def _size(size: Bytes | None) -> str:
    return "–" if size is None else show_bytes(size)
