"""vmckpt snapshot show, diff and verify, and boot tests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, seconds
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import IDENTITY, SNAPSHOT, STORE, STORES, Ticker, identity_of
from vmckpt.errors import BadInput, StoreDamaged, StoreError
from vmckpt.units import Bytes, Seconds, show_bytes, show_count, show_seconds

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
    typer.Option(
        "--boot", help="Also boot the named snapshots, or each guest's newest, as test guests."
    ),
]
ON = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="Host for test guests. Default: the host of each snapshot."),
]
SCRATCH = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory on the host for test disks. Default: next to the guest's disks.",
    ),
]
FOR = Annotated[
    Seconds | None,
    typer.Option(
        "--for",
        parser=seconds,
        metavar="TIME",
        help="How long each test guest must run. Default: 10s.",
    ),
]


def boot_all(
    inventory: "controller.Inventory", store: str | None, words: Sequence[str],
    key: "Identity | None", *, on: str | None, scratch: Path | None, watch: Seconds | None,
) -> "tuple[Booted, ...]":  # fmt: skip
    """Boot snapshots one after the other, as test guests.

    `words`: IDs or names; empty: the newest snapshot of each guest. `scratch`: an absolute path on
    the host. `watch`: how long each test guest must run, in seconds. Raises BadInput, and the
    errors of `boot_test.boot`.
    """
    from vmckpt.app import boot_test, controller
    from vmckpt.snapshot.verify.boot_test import WATCH

    if scratch is not None and not scratch.is_absolute():
        raise BadInput(
            f"--scratch {scratch}: not an absolute path", hint="use an absolute path on the host"
        )

    async def run() -> "tuple[Booted, ...]":
        stop = stop_on_signals("stopping: removing the test guest")
        caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
        acting = controller.Controller(inventory=inventory, caller=caller)
        return await boot_test.boot(
            acting, store, words, on=on, folder=None if scratch is None else str(scratch),
            watch=watch or WATCH, identity=key, each=_say,
        )  # fmt: skip

    return asyncio.run(run())


def _say(one: "Booted") -> None:
    word = "runs" if one.lives else "does not run"
    output.say(f"{one.snapshot} {one.name}: {word} on {one.host}: {one.why}")


def check_booted(booted: "Sequence[Booted]") -> None:
    """Raise StoreDamaged if a test guest did not run."""
    dead = [one for one in booted if not one.lives]
    if dead:
        more = f"; {len(dead) - 1} more failed as well" if len(dead) > 1 else ""
        raise StoreDamaged(
            f"{dead[0].snapshot} does not run when restored on {dead[0].host}: {dead[0].why}{more}",
            hint="try an older snapshot, or restore this snapshot with --as and look at the"
            " guest's console",
        )


def show_booted(booted: "Sequence[Booted]") -> None:
    """Print how many test guests ran."""
    alive = sum(one.lives for one in booted)
    took = show_seconds(Seconds(sum(one.took for one in booted)))
    output.out.print(
        f"{alive} of {len(booted)} test guests ran, in {took}; all test guests were removed"
    )


def add_to(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    for command in (show, diff, verify):
        app.command()(command)


def show(
    snapshot: SNAPSHOT,
    identity: IDENTITY = None,
    xml: Annotated[bool, typer.Option("--xml", help="Print only the domain XML.")] = False,
    store: STORES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show the metadata of a snapshot.

    Without a key, the command shows the public part; with --identity, also the encrypted part.

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
    # The public part was printed first, because it lists the keys that open the snapshot.
    if refused is not None:
        raise refused


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="The older snapshot.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The newer snapshot.")],
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show how much each memory region and disk changed.

    The figures are upper bounds: data that was stored again, for example by a full snapshot, counts
    as changed.

    Examples:

        vmckpt snapshot diff s-k3fq s-m2aa --identity ~/vmckpt.key

        vmckpt snapshot diff before after --json
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
        typer.Argument(
            metavar="SNAPSHOT", help="IDs or names. Default: all snapshots in the store."
        ),
    ] = None,
    sealed: Annotated[
        bool, typer.Option("--sealed", help="Use no private key, even if --identity is given.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read every chunk and verify its contents.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Before verifying, remove damaged objects, but save intact chunks."
        ),
    ] = False,
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="STORE", help="With --repair: fetch missing data from this store."
        ),
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
    """Verify that snapshots are complete and intact.

    The command reports all damage, and exits with code 41 if it finds any. Without a key, it
    verifies every bit of every object, the signatures, and that no object is missing. With a key,
    it also verifies that the snapshots can be opened and match their chunks. --deep also reads all
    chunks. --boot restores each named snapshot, or the newest snapshot of each guest, as a test
    guest without network, checks that the test guest runs, and removes it.

    Examples:

        vmckpt snapshot verify

        vmckpt snapshot verify before-upgrade --deep --identity ~/vmckpt.key

        vmckpt snapshot verify --sealed --store far --json

        vmckpt snapshot verify --repair --from far

        vmckpt snapshot verify before --boot --on beta --scratch /srv/scratch
    """
    from vmckpt.app import controller, snapshot_store
    from vmckpt.snapshot.verify.verify import Depth

    if sealed and deep:
        raise BadInput("--deep and --sealed are mutually exclusive", hint="use one of them")
    if boot and sealed:
        raise BadInput("--boot and --sealed are mutually exclusive", hint="use one of them")
    if not boot and (on or scratch or watch):
        raise BadInput("--on, --scratch and --for require --boot", hint="add --boot")
    if from_ and not repair:
        raise BadInput("--from requires --repair", hint="add --repair")
    if repair and snapshots:
        raise BadInput("--repair applies to a complete store", hint="omit the snapshots")
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
        f"repaired: {show_count(len(mended.removed), 'damaged object')} removed,"
        f" {show_count(mended.saved, 'chunk')} recovered,"
        f" {mended.brought} fetched from other stores ({show_bytes(mended.brought_bytes)})",
        soft_wrap=True,
    )
    for id_ in mended.snapshots:
        output.out.print(f"{id_}: restored to the store", soft_wrap=True)
    for id_, count in mended.lost.items():
        output.out.print(
            f"{id_}: {show_count(count, 'chunk')} still missing; use --from with another store",
            soft_wrap=True,
        )


def _print_proof(found: "Proved") -> None:
    from vmckpt.snapshot.verify.verify import Depth

    for flaw in found.flaws:
        output.out.print(str(flaw), soft_wrap=True)
    opened = f", {found.opened} of them opened" if found.depth is not Depth.SEALED else ""
    read = f", {show_count(found.chunks, 'chunk')} read" if found.depth is Depth.DEEP else ""
    state = f"{len(found.flaws)} failed" if found.flaws else "all intact"
    output.out.print(
        f"{found.where}: {show_count(found.snapshots, 'snapshot')}{opened},"
        f" {show_count(found.objects, 'object')},"
        f" {show_bytes(found.bytes)}{read}: {state}",
        soft_wrap=True,
    )
    if found.closed and found.depth is Depth.OPENED:
        output.say(f"not opened: {show_count(len(found.closed), 'snapshot')} (no matching key)")


def _print_rows(rows: list[tuple[str, str]]) -> None:
    shown = output.table("", "")
    shown.show_header = False
    for name, text in rows:
        shown.add_row(name, output.in_one_line(text))
    output.out.print(shown)


def _public_rows(found: "Shown") -> list[tuple[str, str]]:
    from vmckpt.snapshot.catalog import time_text
    from vmckpt.store.keys.key_files import fingerprint

    told, chunks = found.looked.public, len(found.looked.found.names)
    names = {one.fingerprint: one.name for one in found.admins}
    if found.looked.wrong is not None:
        keys = f"unknown: {found.looked.wrong}"
    else:
        keys = ", ".join(
            f"{names[one]} ({one})" if one in names else one for one in found.looked.keys
        )
    notes = [
        "pinned" if found.looked.pinned else "",
        "" if found.looked.trusted else "writer not trusted",
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
        ("chunks", f"{chunks:,}, with at most {show_bytes(told.new)} that the store did not have"),
        ("runs on", f"QEMU {told.qemu}, {told.machine}, {told.accelerator}, {told.arch}"),
        ("tags", ", ".join(f"{name}={value}" for name, value in told.tags.items())),
        ("opened by", keys if told.data_key_id else "no key needed: not encrypted"),
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
    rows += [("contains", f"{name}, {len(file)} bytes") for name, file in private.files.items()]
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
    beside = "" if found.follows else "; the second snapshot is not based on the first"
    output.out.print(f"changed: at most {show_bytes(found.changed)}{beside}")


def _size(size: Bytes | None) -> str:
    return "–" if size is None else show_bytes(size)
