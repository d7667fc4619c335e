"""vmckpt snapshot open: read the contents of a snapshot without restoring it."""

import re
import signal
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.snapshot.options import IDENTITY, SNAPSHOT, STORES, Ticker, identity_of
from vmckpt.errors import BadInput
from vmckpt.units import Bytes, show_bytes, show_count
from vmckpt.util import stop_signals

if TYPE_CHECKING:
    from vmckpt.capture.nbd.protocol import Tcp
    from vmckpt.capture.nbd.session import Export
    from vmckpt.snapshot.browse import Browse
    from vmckpt.snapshot.files import Entry

_DISK = re.compile(r"([^:]+)(?::([0-9]{1,3}))?")
_PORT = re.compile(r"(?:(.+):)?([0-9]{1,5})")
_LOOK = 1.0


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("open")(open_)


def open_(
    snapshot: SNAPSHOT,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="DISK[:PARTITION]",
            help="Disk or partition, like vda:1. Default: all disks; for files, the only disk.",
        ),
    ] = None,
    nbd: Annotated[
        Path | None,
        typer.Option(metavar="SOCKET", help="Serve disks on this socket, with mode 0600."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS:]PORT", help="Serve disks on a loopback port; clients need a key."
        ),
    ] = None,
    files: Annotated[str | None, typer.Option(metavar="PATH", help="List a directory.")] = None,
    get: Annotated[
        str | None, typer.Option(metavar="PATH", help="Copy a file or a directory from a disk.")
    ] = None,
    to: Annotated[
        Path, typer.Option(metavar="PLACE", help="Target of --get; '-' is stdout.")
    ] = Path(),
    core: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the memory as an ELF core.")
    ] = None,
    identity: IDENTITY = None,
    store: STORES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Read disks, files or memory of a snapshot without restoring it.

    By default, the command serves the disks read-only over NBD until Ctrl-C. Only data that a
    client reads is fetched from the store. The socket is in a new private directory; use --nbd for
    another path, or --listen for a loopback port. Other users of this machine cannot read the
    disks: clients of the port need a key, which is written to a new private directory.

    --files and --get read files from ext2, ext3 and ext4, on a disk or in a partition, without
    mounting the file system. They ignore data that is only in the file system's journal, and do not
    preserve owners or links. --core writes a sparse ELF core for gdb and crash.

    Examples:

        vmckpt snapshot open before-upgrade

        vmckpt snapshot open before-upgrade --nbd ~/web1.sock

        qemu-img convert nbd+unix:///vda?socket=$HOME/web1.sock web1.raw

        vmckpt snapshot open before-upgrade --disk vda:1 --get /etc/fstab --to -

        vmckpt snapshot open before-upgrade --core web1.core
    """
    from vmckpt.app import controller, snapshot_store

    _at_most_one(nbd, listen, files, get, core)
    port = None if listen is None else _port(listen)
    known = controller.load_inventory(inventory)
    with snapshot_store.opened(known, store, snapshot, identity_of(identity)) as browse:
        if core is not None:
            _core(browse, core, json=json)
        elif files is not None or get is not None:
            _files(browse, disk, files, get, to, json=json)
        elif port is not None:
            _serve_with_key(browse, disk, port, json=json)
        else:
            _serve(browse, disk, nbd, json=json)


def _at_most_one(*asked: object) -> None:
    if sum(one is not None for one in asked) > 1:
        raise BadInput(
            "--nbd, --listen, --files, --get and --core are mutually exclusive",
            hint="use one of them",
        )


def _port(text: str) -> "Tcp":
    from vmckpt.capture.nbd.protocol import Tcp

    match = _PORT.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise BadInput(
            f"{text!r} is not a valid port or address",
            hint="use a value like 10809 or 127.0.0.1:10809",
        )
    return Tcp((match[1] or "127.0.0.1").strip("[]"), int(match[2]))


def _named(disk: str | None, browse: "Browse") -> tuple[str, int | None]:
    """Parse DISK[:PARTITION]; if it is None, return the snapshot's only disk. Raises BadInput."""
    if disk is None:
        if len(browse.disks()) != 1:
            raise BadInput(
                f"no disk is selected; {browse.public.id} has these disks:"
                f" {', '.join(browse.disks()) or 'none'}",
                hint="select a disk with --disk",
            )
        return browse.disks()[0], None
    match = _DISK.fullmatch(disk)
    if match is None:
        raise BadInput(f"{disk!r} is not a disk", hint="use a value like vda or vda:1")
    return match[1], None if match[2] is None else int(match[2])


def _exports(browse: "Browse", disk: str | None) -> "Mapping[str, Export]":
    name = None
    if disk is not None:
        name, number = _named(disk, browse)
        if number is not None:
            raise BadInput(f"{disk}: only complete disks can be served", hint=f"use --disk {name}")
    return browse.exports(name)


def _serve(browse: "Browse", disk: str | None, path: Path | None, *, json: bool) -> None:
    from vmckpt.capture.nbd.protocol import Unix
    from vmckpt.capture.nbd.server import Server
    from vmckpt.snapshot import nbd_tls_port

    exports = _exports(browse, disk)
    with ExitStack() as stack:
        ended = stack.enter_context(_until_stopped())
        if path is None:
            path = stack.enter_context(nbd_tls_port.own_directory()) / "nbd"
        server = stack.enter_context(Server(exports, Unix(str(path.absolute()))))
        uris = {one: server.uri(one) for one in exports}
        if json:
            output.print_json({"snapshot": browse.public.id, "exports": uris})
        else:
            for one, uri in uris.items():
                output.out.print(f"{one}: {uri}", soft_wrap=True)
        _say_served()
        while not ended.wait(_LOOK):
            pass
    output.say("stopped serving")


def _serve_with_key(browse: "Browse", disk: str | None, place: "Tcp", *, json: bool) -> None:
    from vmckpt.snapshot import nbd_tls_port

    exports = _exports(browse, disk)
    with _until_stopped() as ended, nbd_tls_port.served(exports, place) as port:
        uris = {one: port.uri(one) for one in exports}
        directory = str(port.key_directory)
        if json:
            told = {"exports": uris, "tls_psk_dir": directory}
            output.print_json({"snapshot": browse.public.id, **told})
        else:
            for one, uri in uris.items():
                output.out.print(f"{one}: {uri}", soft_wrap=True)
                output.out.print(f"  qemu-img convert {port.qemu_options(one)} ...", soft_wrap=True)
        output.say(f"{place.host}:{port.place.port} requires the key in {directory}")
        _say_served()
        while not ended.wait(_LOOK):
            port.must_live()
    output.say("stopped serving")


def _say_served() -> None:
    sys.stdout.flush()
    output.say("serving read-only; press Ctrl-C to stop")


@contextmanager
def _until_stopped() -> Iterator[threading.Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set; restore their handlers afterwards."""
    ended = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    stop_signals.set_on(numbers, ended)
    try:
        yield ended
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _files(
    browse: "Browse", disk: str | None, path: str | None, get: str | None, to: Path, *, json: bool
) -> None:
    from vmckpt.snapshot import files as snapshot_files

    name, number = _named(disk, browse)
    with snapshot_files.opened(browse.export(name), name, number) as found:
        if path is not None:
            listed = found.list(path)
            if json:
                output.print_json([_entry_json(one) for one in listed])
            else:
                _list(listed)
        elif get is not None and str(to) == "-":
            sys.stdout.buffer.write(found.read(get))
            sys.stdout.buffer.flush()
        elif get is not None:
            place, left_out = found.get(get, to)
            if json:
                output.print_json({"path": str(place), "left_out": left_out})
            else:
                rest = f"; skipped (neither file nor directory): {left_out}" if left_out else ""
                output.say(f"{place}{rest}")


def _entry_json(one: "Entry") -> dict[str, object]:
    return {
        "name": one.name,
        "mode": stat.filemode(one.mode),
        "bytes": one.size,
        "uid": one.uid,
        "gid": one.gid,
    }


def _list(listed: "tuple[Entry, ...]") -> None:
    table = output.table("mode", ">uid", ">gid", ">size", "name")
    for one in listed:
        size = "" if one.folder else show_bytes(Bytes(one.size))
        name = output.in_one_line(one.name)
        table.add_row(stat.filemode(one.mode), str(one.uid), str(one.gid), size, name)
    output.out.print(table)


def _core(browse: "Browse", path: Path, *, json: bool) -> None:
    processors = browse.core(path, Ticker().take)
    size = Bytes(path.stat().st_size)
    if json:
        told = {"path": str(path), "bytes": size, "processors": processors}
        output.print_json({"snapshot": browse.public.id, **told})
    else:
        output.say(f"{path}: {show_bytes(size)} of memory, {show_count(processors, 'processor')}")
