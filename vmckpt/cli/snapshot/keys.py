"""vmckpt snapshot keys: who can read snapshots, whose signatures count, and the domain's salt."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, help_alone
from vmckpt.cli.snapshot.options import (
    DRY_RUN,
    IDENTITY,
    YES,
    Ticker,
    asked_passphrase,
    chosen_passphrase,
    identity_of,
    sure,
)
from vmckpt.errors import KeyRefused, StoreDamaged

if TYPE_CHECKING:
    from vmckpt.app.snapshot_store import Keys
    from vmckpt.snapshot.rekey import Rotated
    from vmckpt.store.keys.keyring import Named

FILE = Annotated[Path, typer.Argument(help="The file that carries it.")]


def add_salt_to(keys: typer.Typer) -> None:
    """Make these commands of `keys`."""
    keys.command()(export_salt)
    keys.command()(import_salt)


def export_salt(
    file: FILE,
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Who has the file has the salt.")
    ] = False,
    json: JSON = False,
) -> None:
    """Put the domain's salt into a new file, for another controller that shares these stores.

    With the same salt, what both write is stored once. It opens no snapshot; but who has it, and
    may read a store, can find out whether that has a content which he can guess.

    Example:

        vmckpt snapshot keys export-salt salt.key
    """
    from vmckpt.app import snapshot_store

    passphrase = None if no_passphrase else chosen_passphrase()
    domain = snapshot_store.export_salt(file, passphrase)
    if json:
        output.print_json(
            {"file": str(file), "domain": domain, "passphrase": passphrase is not None}
        )
        return
    output.out.print(f"the salt of domain {domain} is in {file}", soft_wrap=True)
    output.say(f"on the other controller: vmckpt snapshot keys import-salt {file}")


def import_salt(file: FILE, json: JSON = False) -> None:
    """Join another controller's domain: what both write is stored once.

    A controller has one domain. What it signed before stays as it is.

    Example:

        vmckpt snapshot keys import-salt salt.key
    """
    from vmckpt.app import snapshot_store

    domain = snapshot_store.import_salt(file, lambda: asked_passphrase(file))
    encrypts = bool(snapshot_store.keys().admins)
    if json:
        output.print_json({"domain": domain, "encrypts": encrypts})
        return
    output.out.print(f"new snapshots are in domain {domain}")
    if not encrypts:
        output.say("say for whom they are to be: vmckpt snapshot keys add NAME KEY")
    output.say("to believe each other: vmckpt snapshot keys trust NAME KEY, on both")


keys = typer.Typer(name="keys", invoke_without_command=True, rich_markup_mode=None)
NAME = Annotated[str, typer.Argument(help="What you call it.")]


@keys.callback()
def keys_options(context: typer.Context) -> None:
    """Who can read snapshots, and whose snapshots are believed."""
    help_alone(context)


def add_to(app: typer.Typer) -> None:
    """Make these commands of `app`."""
    add_salt_to(keys)
    app.add_typer(keys, name="keys")


@keys.command("list")
def list_(json: JSON = False) -> None:
    """List the keys of this controller: whom it encrypts for, and whom it believes.

    Example:

        vmckpt snapshot keys list
    """
    from vmckpt.app import snapshot_store

    found = snapshot_store.keys()
    if json:
        output.print_json(
            {
                "encrypts": bool(found.admins),
                "domain": found.domain,
                "writer": None if found.writer is None else _json(found.writer),
                "admins": [_json(one) for one in found.admins],
                "writers": [_json(one) for one in found.writers],
            }
        )
    else:
        _print_keys(found)


def _json(one: "Named") -> dict[str, Any]:
    return {"name": one.name, "key": one.text, "fingerprint": one.fingerprint}


def _print_keys(found: "Keys") -> None:
    lines = [(one, one.name, "reads new snapshots") for one in found.admins]
    if found.writer is not None:
        lines.append((found.writer, "this controller", "signs what it makes, and is believed"))
    lines += [(one, one.name, "is believed") for one in found.writers]
    for one, name, what in lines:
        # A key on a line of its own can be copied whatever the terminal's width.
        output.out.print(f"{name} {what} ({one.fingerprint}):", soft_wrap=True)
        output.out.print(f"    {one.text}", soft_wrap=True)
    if found.admins:
        output.out.print(f"new snapshots are encrypted, in domain {found.domain}")
    else:
        output.out.print("new snapshots are not encrypted: vmckpt snapshot keys add NAME KEY")


@keys.command()
def new(
    file: Annotated[Path, typer.Argument(help="A new file, best not on a host.")],
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Who has the file can read snapshots.")
    ] = False,
    json: JSON = False,
) -> None:
    """Make an identity: a file that opens the snapshots that are made for its public key.

    Without the file, and its passphrase, nobody reads them: keep a copy in another place.

    Examples:

        vmckpt snapshot keys new ~/vmckpt.key

        VMCKPT_PASSPHRASE_FILE=/run/secret vmckpt snapshot keys new vmckpt.key --json
    """
    from vmckpt.app import snapshot_store
    from vmckpt.store.keys.key_files import KeyKind, key_text

    passphrase = None if no_passphrase else chosen_passphrase()
    text = key_text(KeyKind.ADMIN, snapshot_store.new_identity(file, passphrase))
    if json:
        output.print_json({"file": str(file), "key": text, "passphrase": passphrase is not None})
        return
    output.out.print(text, soft_wrap=True)
    output.say(f"to encrypt for it: vmckpt snapshot keys add NAME {text}")


@keys.command()
def add(
    name: NAME,
    key: Annotated[str, typer.Argument(help="An administrator's public key.")],
    json: JSON = False,
) -> None:
    """Encrypt new snapshots for one more. From the first key on, all new ones are encrypted.

    Those there are stay as they are; `rotate` makes them open for it, too.

    Example:

        vmckpt snapshot keys add alice vmckpt-admin-pub:…
    """
    from vmckpt.app import snapshot_store

    first = not snapshot_store.keys().admins
    added = snapshot_store.add_key(name, key)
    if json:
        output.print_json(_json(added))
        return
    output.out.print(f"new snapshots are encrypted for {added.name} ({added.fingerprint})")
    if first:
        output.say("encryption is on; snapshots made before are open as they were")
    else:
        output.say("for those there are: vmckpt snapshot keys rotate --identity FILE")


@keys.command()
def remove(name: NAME, json: JSON = False) -> None:
    """Encrypt new snapshots no more for somebody. The last key cannot be removed.

    What was made for the key stays open for it until `rotate`.

    Example:

        vmckpt snapshot keys remove alice
    """
    from vmckpt.app import snapshot_store

    snapshot_store.remove_key(name)
    _told(name, f"new snapshots are not for {name}", json=json)
    output.say("for those there are: vmckpt snapshot keys rotate --identity FILE")


@keys.command()
def trust(
    name: NAME,
    key: Annotated[str, typer.Argument(help="A writer's public key, as its `keys list` says.")],
    json: JSON = False,
) -> None:
    """Believe the snapshots that one more writer has signed.

    Example:

        vmckpt snapshot keys trust other-controller vmckpt-writer-pub:…
    """
    from vmckpt.app import snapshot_store

    added = snapshot_store.trust(name, key)
    if json:
        output.print_json(_json(added))
    else:
        output.out.print(f"what {added.name} ({added.fingerprint}) has signed is believed")


@keys.command()
def distrust(name: NAME, json: JSON = False) -> None:
    """Believe a writer no more: its snapshots are neither opened nor restored nor pruned.

    Example:

        vmckpt snapshot keys distrust other-controller
    """
    from vmckpt.app import snapshot_store

    snapshot_store.distrust(name)
    _told(name, f"what {name} has signed is not believed", json=json)


def _told(name: str, line: str, *, json: bool) -> None:
    if json:
        output.print_json({"name": name})
    else:
        output.out.print(line)


@keys.command()
def rotate(
    identity: IDENTITY = None,
    drop: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove this key first, as `remove` does.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="Only in these stores; else in all.")
    ] = None,
    dry_run: DRY_RUN = False,
    yes: YES = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Make all snapshots open for the keys there are now, and for no others.

    Only the wrapped keys are written anew, no data. Who has opened a snapshot before may have kept
    its key: this is for a key that is lost, not for one that somebody has copied.

    Examples:

        vmckpt snapshot keys rotate --identity ~/vmckpt.key --dry-run

        vmckpt snapshot keys rotate --identity ~/vmckpt.key --drop alice --yes
    """
    from vmckpt.app import controller, snapshot_store

    key = identity_of(identity)
    if key is None:
        raise KeyRefused("an identity must open the snapshots first", hint="name it: --identity")
    known = controller.load_inventory(inventory)
    left = snapshot_store.heirs(drop)
    names = ", ".join(one.name for one in left)
    if not dry_run:
        known.may_act()
        sure(f"make all snapshots open for {names} alone?", yes=yes)
    done = []
    for one in snapshot_store.rotate(
        known, store or (), key, drop, dry_run=dry_run, progress=Ticker().count
    ):
        done.append(one)
        if not json:
            _print_rotated(one, names, dry_run=dry_run)
    if json:
        output.print_json(
            {
                "dry_run": dry_run,
                "keys": [_json(one) for one in left],
                "stores": [one.as_json() for one in done],
            }
        )
    _check(done)


def _print_rotated(one: "Rotated", names: str, *, dry_run: bool) -> None:
    would = "would be" if dry_run else "are"
    beside = f"; {len(one.open)} are not encrypted" if one.open else ""
    output.out.print(
        f"{one.store}: {len(one.rewrapped)} snapshots {would} for {names}{beside}", soft_wrap=True
    )
    for id_, why in {**one.refused, **one.damaged}.items():
        output.out.print(f"left as it is: {id_}: {why}", soft_wrap=True)


def _check(done: "list[Rotated]") -> None:
    """Raises StoreDamaged or KeyRefused if not all snapshots could be made open."""
    damaged = sum(len(one.damaged) for one in done)
    refused = sum(len(one.refused) for one in done)
    if damaged:
        raise StoreDamaged(
            f"{damaged} snapshots were left as they are, for they are damaged",
            hint="vmckpt snapshot verify tells more",
        )
    if refused:
        raise KeyRefused(
            f"{refused} snapshots were left as they are: not for this identity, or not signed by a"
            " trusted writer",
            hint="rotate again with an identity that opens them",
        )
