"""Options, confirmation prompts and progress output shared by the snapshot commands."""

import getpass
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.errors import BadInput, Cancelled, KeyRefused
from vmckpt.model.events import Copied, Event
from vmckpt.units import Seconds, show_bytes, show_rate

if TYPE_CHECKING:
    from vmckpt.snapshot.catalog import Identity

PASSPHRASE = "VMCKPT_PASSPHRASE_FILE"
_EVERY = Seconds(1.0)
_TELLING = Seconds(0.5)
"""Minimum time over which a rate is computed; shorter measurements are unreliable."""

STORE = Annotated[
    str | None,
    typer.Option(metavar="STORE", help="Name of a store in the inventory. Default: the first."),
]
STORES = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="STORE", help="Name of a store in the inventory. Default: all."
    ),
]
SNAPSHOT = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help="ID, ID prefix or name of a snapshot.")
]
SNAPSHOTS = Annotated[
    list[str],
    typer.Argument(metavar="SNAPSHOT", help="IDs, ID prefixes or names of snapshots."),
]
IDENTITY = Annotated[
    Path | None,
    typer.Option(
        envvar="VMCKPT_IDENTITY", metavar="FILE", help="Private key that opens encrypted snapshots."
    ),
]
YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DRY_RUN = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")
]


class Ticker:
    """The progress of a long operation: at most one line per second on stderr, with the rate."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._phase, self._from, self._since = "", 0, self._began

    def take(self, event: Event) -> None:
        """Print progress in bytes. Usable as snapshot.catalog.Progress and as Caller.emit."""
        if not isinstance(event, Copied):
            return
        now = time.monotonic()
        if event.phase != self._phase:
            self._phase, self._from, self._since = event.phase, 0, now
        if now - self._told < _EVERY:
            return
        self._told = now
        of = "" if event.total is None else f" of {show_bytes(event.total)}"
        new = f", {show_bytes(event.new)} new" if event.new else ""
        rate = ""
        if (spent := now - self._since) > _TELLING:
            rate = f", {show_rate((event.done - self._from) / spent)}"
        done = f"{event.phase}: {show_bytes(event.done)}{of}{new}"
        output.say(f"{now - self._began:7.1f}s {done}{rate}")

    def count(self, done: int, total: int) -> None:
        """Print progress as a number of objects."""
        now = time.monotonic()
        if now - self._told >= _EVERY:
            self._told = now
            output.say(f"{now - self._began:7.1f}s {done} of {total}")


def sure(question: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `yes`.

    Raises Cancelled if the user declines, BadInput if stdin is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput(
            f"{question.rstrip('?')}: stdin is not a terminal, so no confirmation is possible;"
            " nothing was changed",
            hint="add --yes to confirm",
        )
    if not typer.confirm(output.in_one_line(question), err=True):
        raise Cancelled("nothing was changed")


def identity_of(path: Path | None) -> "Identity | None":
    """Return a function that loads the identity, or None if no file is named."""
    if path is None:
        return None
    from vmckpt.app import stores

    return stores.load_identity(path, lambda: asked_passphrase(path))


def asked_passphrase(path: Path) -> str:
    """Return the passphrase of a file, from VMCKPT_PASSPHRASE_FILE or by asking for it.

    Raises KeyRefused if stdin is not a terminal, and the errors of `given_passphrase`.
    """
    given = given_passphrase()
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise KeyRefused(
            f"{path} is protected by a passphrase, and stdin is not a terminal",
            hint=f"set {PASSPHRASE} to a file with the passphrase",
        )
    return getpass.getpass(f"passphrase of {output.in_one_line(str(path))}: ")


def given_passphrase() -> str | None:
    """Return the first line of the file named by VMCKPT_PASSPHRASE_FILE; None if unset.

    Raises KeyRefused if the file is missing, or if other users may read it.
    """
    from vmckpt.store.keys import key_files

    named = os.environ.get(PASSPHRASE)
    if not named:
        return None
    told = key_files.read(Path(named), secret=True)
    if told is None:
        raise KeyRefused(f"{named}: no such file", hint=f"correct {PASSPHRASE}")
    return told.partition("\n")[0].rstrip("\r")


def chosen_passphrase() -> str:
    """Return a new passphrase, from VMCKPT_PASSPHRASE_FILE or by asking for it twice.

    Raises KeyRefused if the two passphrases differ or stdin is not a terminal, and the errors of
    `given_passphrase`.
    """
    given = given_passphrase()
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise KeyRefused(
            "stdin is not a terminal, so no passphrase can be entered",
            hint=f"set {PASSPHRASE} to a file with the passphrase, or add --no-passphrase",
        )
    chosen = getpass.getpass("new passphrase: ")
    if getpass.getpass("again: ") != chosen:
        raise KeyRefused("the two passphrases differ; nothing was written", hint="try again")
    return chosen
