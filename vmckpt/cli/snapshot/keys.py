"""vmckpt snapshot keys: keys that open snapshots, trusted writers, and the domain's salt."""

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
from vmckpt.units import show_count

if TYPE_CHECKING:
    from vmckpt.app.snapshot_store import Keys
    from vmckpt.snapshot.rekey import Rotated
    from vmckpt.store.keys.keyring import Named

FILE = Annotated[Path, typer.Argument(metavar="FILE", help="File with the salt.")]


def add_salt_to(keys: typer.Typer) -> None:
    """Add the commands for the salt to `keys`."""
    keys.command()(export_salt)
    keys.command()(import_salt)


def export_salt(
    file: FILE,
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Do not protect the file with a passphrase.")
    ] = False,
    json: JSON = False,
) -> None:
    """Write the domain's salt to a new file for another controller.

    Controllers with the same salt store identical data only once. The salt does not open snapshots.
    However, with the salt and read access to a store, an attacker can check whether the store
    contains data that the attacker has guessed.

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
    output.out.print(f"wrote the salt of domain {domain} to {file}", soft_wrap=True)
    output.say(
        f"copy {file} to the other controller, and run vmckpt snapshot keys import-salt FILE there"
    )


def import_salt(file: FILE, json: JSON = False) -> None:
    """Join another controller's domain, to share its chunks.

    Data that both controllers write is then stored only once. A controller is in one domain at a
    time. Snapshots that this controller has already signed do not change.

    Example:

        vmckpt snapshot keys import-salt salt.key
    """
    from vmckpt.app import snapshot_store

    domain = snapshot_store.import_salt(file, lambda: asked_passphrase(file))
    encrypts = bool(snapshot_store.keys().admins)
    if json:
        output.print_json({"domain": domain, "encrypts": encrypts})
        return
    output.out.print(f"new snapshots will be in domain {domain}")
    if not encrypts:
        output.say("to encrypt snapshots, run vmckpt snapshot keys add NAME KEY")
    output.say(
        "to let both controllers trust each other's snapshots, run vmckpt snapshot keys trust NAME"
        " KEY on both"
    )


keys = typer.Typer(name="keys", invoke_without_command=True, rich_markup_mode=None)
NAME = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key; any name when you add a key.")
]


@keys.callback()
def keys_options(context: typer.Context) -> None:
    """Manage the keys that open snapshots, and trusted writers."""
    help_alone(context)


def add_to(app: typer.Typer) -> None:
    """Add the group `keys` to `app`."""
    add_salt_to(keys)
    app.add_typer(keys, name="keys")


@keys.command("list")
def list_(json: JSON = False) -> None:
    """List the administrators' keys and the trusted writers.

    New snapshots are encrypted for the administrators' keys. Only snapshots signed by a trusted
    writer can be opened and restored.

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
    lines = [(one, one.name, "can read new snapshots") for one in found.admins]
    if found.writer is not None:
        lines.append((found.writer, "this controller", "signs its snapshots, and is trusted"))
    lines += [(one, one.name, "is trusted") for one in found.writers]
    for one, name, what in lines:
        # A key on its own line can be copied at any width of the terminal.
        output.out.print(f"{name} {what} ({one.fingerprint}):", soft_wrap=True)
        output.out.print(f"    {one.text}", soft_wrap=True)
    if found.admins:
        output.out.print(f"new snapshots are encrypted (deduplication domain {found.domain})")
    else:
        output.out.print(
            "new snapshots are not encrypted; to change this, run vmckpt snapshot keys add NAME KEY"
        )


@keys.command()
def new(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="New file, preferably not on a host.")
    ],
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Do not protect the file with a passphrase.")
    ] = False,
    json: JSON = False,
) -> None:
    """Create an identity: a private key that opens snapshots.

    The command prints the public key of the identity. Snapshots that are encrypted for this public
    key can be read only with the file and its passphrase, so keep a copy in another place.

    Examples:

        vmckpt snapshot keys new ~/vmckpt.key

        VMCKPT_PASSPHRASE_FILE=/run/secret vmckpt snapshot keys new vmckpt.key
    """
    from vmckpt.app import snapshot_store
    from vmckpt.store.keys.key_files import KeyKind, key_text

    passphrase = None if no_passphrase else chosen_passphrase()
    text = key_text(KeyKind.ADMIN, snapshot_store.new_identity(file, passphrase))
    if json:
        output.print_json({"file": str(file), "key": text, "passphrase": passphrase is not None})
        return
    output.out.print(text, soft_wrap=True)
    output.say(f"to encrypt snapshots for this key, run vmckpt snapshot keys add NAME {text}")


@keys.command()
def add(
    name: NAME,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Public key of an administrator.")],
    json: JSON = False,
) -> None:
    """Encrypt new snapshots for an additional key.

    Adding the first key turns on encryption of new snapshots. Existing snapshots do not change; run
    `rotate` so that the new key can open existing snapshots.

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
        output.say("encryption is on; existing snapshots stay unencrypted")
    else:
        output.say(
            "to let the key open existing snapshots, run vmckpt snapshot keys rotate"
            " --identity FILE"
        )


@keys.command()
def remove(name: NAME, json: JSON = False) -> None:
    """Stop encrypting new snapshots for a key.

    The last key cannot be removed. The key still opens existing snapshots until you run `rotate`.

    Example:

        vmckpt snapshot keys remove alice
    """
    from vmckpt.app import snapshot_store

    snapshot_store.remove_key(name)
    _told(name, f"new snapshots are no longer encrypted for {name}", json=json)
    output.say(
        "the key still opens existing snapshots; to prevent this, run vmckpt snapshot keys rotate"
        " --identity FILE"
    )


@keys.command()
def trust(
    name: NAME,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="Public key of the writer, from `keys list` on its controller."
        ),
    ],
    json: JSON = False,
) -> None:
    """Trust the snapshots that another writer has signed.

    Example:

        vmckpt snapshot keys trust other-controller vmckpt-writer-pub:…
    """
    from vmckpt.app import snapshot_store

    added = snapshot_store.trust(name, key)
    if json:
        output.print_json(_json(added))
    else:
        output.out.print(f"snapshots signed by {added.name} ({added.fingerprint}) are trusted")


@keys.command()
def distrust(name: NAME, json: JSON = False) -> None:
    """Stop trusting a writer.

    The writer's snapshots are no longer opened, restored or pruned.

    Example:

        vmckpt snapshot keys distrust other-controller
    """
    from vmckpt.app import snapshot_store

    snapshot_store.distrust(name)
    _told(name, f"snapshots signed by {name} are no longer trusted", json=json)


def _told(name: str, line: str, *, json: bool) -> None:
    if json:
        output.print_json({"name": name})
    else:
        output.out.print(line)


@keys.command()
def rotate(
    identity: IDENTITY = None,
    drop: Annotated[
        str | None, typer.Option(metavar="NAME", help="First remove this key, as `remove` does.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(metavar="STORE", help="Only these stores. Default: all.")
    ] = None,
    dry_run: DRY_RUN = False,
    yes: YES = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Re-encrypt data keys for the current administrators.

    Afterwards, the administrators' keys open all snapshots that the identity opens, and no other
    key does. Only the wrapped data keys are rewritten, not the data. A reader that has opened a
    snapshot may have kept the snapshot's data key. Use this command after a key was lost, not after
    a key was stolen.

    Examples:

        vmckpt snapshot keys rotate --identity ~/vmckpt.key --dry-run

        vmckpt snapshot keys rotate --identity ~/vmckpt.key --drop alice --yes
    """
    from vmckpt.app import controller, permission, snapshot_store

    key = identity_of(identity)
    if key is None:
        raise KeyRefused("rotate requires an identity", hint="add --identity FILE")
    known = controller.load_inventory(inventory)
    left = snapshot_store.heirs(drop)
    names = ", ".join(one.name for one in left)
    if not dry_run:
        permission.require(known, "snapshot keys rotate")
        sure(f"re-encrypt the data keys of all snapshots for {names} only?", yes=yes)
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
    would = "would be " if dry_run else ""
    beside = f"; {len(one.open)} not encrypted" if one.open else ""
    output.out.print(
        f"{one.store}: {show_count(len(one.rewrapped), 'snapshot')}"
        f" {would}encrypted for {names}{beside}",
        soft_wrap=True,
    )
    for id_, why in {**one.refused, **one.damaged}.items():
        output.out.print(f"unchanged: {id_}: {why}", soft_wrap=True)


def _check(done: "list[Rotated]") -> None:
    """Raise StoreDamaged or KeyRefused if snapshots were left unchanged."""
    damaged = sum(len(one.damaged) for one in done)
    refused = sum(len(one.refused) for one in done)
    if damaged:
        raise StoreDamaged(
            f"{show_count(damaged, 'damaged snapshot')} left unchanged",
            hint="run vmckpt snapshot verify for details",
        )
    if refused:
        raise KeyRefused(
            f"{show_count(refused, 'snapshot')} left unchanged: this identity does not open the"
            " snapshots, or their writer is not trusted",
            hint="run vmckpt snapshot keys rotate with an identity that opens these snapshots",
        )
