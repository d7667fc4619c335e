"""What several of the snapshot commands share: options, questions, progress."""

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
"""A rate over less time is a guess."""

STORE = Annotated[
    str | None, typer.Option(help="A store of the inventory, by name; else its first one.")
]
SNAPSHOT = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help="Its id, the beginning of it, or its name.")
]
SNAPSHOTS = Annotated[
    list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids, beginnings of them, or names.")
]
IDENTITY = Annotated[
    Path | None,
    typer.Option(
        envvar="VMCKPT_IDENTITY", metavar="FILE", help="The key that opens encrypted snapshots."
    ),
]
YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


class Ticker:
    """How far long work is, a line a second on stderr, with its rate."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._phase, self._from, self._since = "", 0, self._began

    def take(self, event: Event) -> None:
        """See snapshot.catalog.Progress, and Caller.emit."""
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
        """The same, of things."""
        now = time.monotonic()
        if now - self._told >= _EVERY:
            self._told = now
            output.say(f"{now - self._began:7.1f}s {done} of {total}")


def sure(question: str, *, yes: bool) -> None:
    """Ask, unless that was said already. Raises Cancelled, and BadInput if nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput(
            f"{question.rstrip('?')}: nobody can be asked here; nothing was changed",
            hint="say --yes if it is meant",
        )
    if not typer.confirm(output.in_one_line(question), err=True):
        raise Cancelled("nothing was changed")


def identity_of(path: Path | None) -> "Identity | None":
    """What loads the identity that was named, if one was."""
    from vmckpt.app import snapshot_store

    if path is None:
        return None
    return snapshot_store.load_identity(path, lambda: asked_passphrase(path))


def asked_passphrase(path: Path) -> str:
    """The passphrase of a file. Raises KeyRefused if nobody can be asked."""
    given = given_passphrase()
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise KeyRefused(
            f"{path}: it has a passphrase, and nobody can be asked here",
            hint=f"name a file that has it with {PASSPHRASE}",
        )
    return getpass.getpass(f"passphrase of {output.in_one_line(str(path))}: ")


def given_passphrase() -> str | None:
    """The first line of the file that VMCKPT_PASSPHRASE_FILE names. Raises KeyRefused."""
    from vmckpt.store.keys import key_files

    named = os.environ.get(PASSPHRASE)
    if not named:
        return None
    told = key_files.read(Path(named), secret=True)
    if told is None:
        raise KeyRefused(f"{named}: no such file", hint=f"see {PASSPHRASE}")
    return told.partition("\n")[0].rstrip("\r")


def chosen_passphrase() -> str:
    """A new passphrase. Raises KeyRefused."""
    given = given_passphrase()
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise KeyRefused(
            "nobody can be asked for a passphrase here",
            hint=f"name a file that has it with {PASSPHRASE}, or say --no-passphrase",
        )
    chosen = getpass.getpass("new passphrase: ")
    if getpass.getpass("again: ") != chosen:
        raise KeyRefused("the two are not the same; nothing was made", hint="try again")
    return chosen
