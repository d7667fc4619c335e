"""vmckpt snapshot keys export-salt and import-salt: two controllers, one domain."""

from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import JSON
from vmckpt.cli.snapshot_options import asked_passphrase, chosen_passphrase

FILE = Annotated[Path, typer.Argument(help="The file that carries it.")]


def add_to(keys: typer.Typer) -> None:
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
