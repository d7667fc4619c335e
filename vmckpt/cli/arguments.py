"""Options and argument types that several commands share, and shell completion.

Completion wants names soon or none: what is wrong is said by the command itself.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt import units
from vmckpt.cli import output
from vmckpt.errors import VmckptError
from vmckpt.units import BytesPerSecond, Seconds

if TYPE_CHECKING:
    from vmckpt.inventory import Inventory


_SOON = Seconds(1.5)
"""A host that does not answer by then has no guests to be completed."""
_LATEST = 50
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:-]*")
"""The shell inserts what is completed as if it had been typed: nothing that it would run."""
Complete = Callable[[typer.Context, str], list[str]]


def _quietly(names: Callable[[typer.Context], Iterable[str]]) -> Complete:
    """Those that begin as what was typed; none if they cannot be told."""

    @wraps(names)
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            found = {one for one in names(ctx) if one.startswith(incomplete)}
            return sorted(one for one in found if _PLAIN.fullmatch(one))
        except (VmckptError, OSError, TimeoutError):
            return []

    del complete.__wrapped__  # typer looks at the parameters
    return complete


def _inventory(ctx: typer.Context) -> "Inventory":
    from vmckpt.app import controller

    return controller.load_inventory(ctx.params.get("inventory"))


@_quietly
def hosts(ctx: typer.Context) -> Iterable[str]:
    """Hosts of hosts.yaml."""
    return _inventory(ctx).hosts


@_quietly
def guests(ctx: typer.Context) -> Iterable[str]:
    """Guests of the hosts that answer at once."""
    from vmckpt.app import fleet

    found, _ = asyncio.run(fleet.guests(_inventory(ctx), _SOON))
    return [guest.name for _, guest in found]


@_quietly
def jobs(_: typer.Context) -> Iterable[str]:
    """Jobs that run, else the latest ones; and their guests."""
    from vmckpt.journal import jobs as journal_jobs

    with journal_jobs.open_journal(read_only=True) as journal:
        found = journal_jobs.jobs(journal)[:_LATEST]
        found = found or journal_jobs.jobs(journal, everything=True, limit=_LATEST)
    return [name for one in found for name in (one.operation.id, one.operation.guest)]


def seconds(text: str) -> Seconds:
    """A time argument."""
    try:
        value = units.parse_seconds(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    if value <= 0:
        raise typer.BadParameter(f"{text!r}: must be more than nothing")
    return value


def rate(text: str) -> BytesPerSecond:
    """A rate argument."""
    try:
        return units.parse_rate(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None


def probe_time(text: str) -> Seconds:
    """A time argument, or "off"."""
    return Seconds(0.0) if text == "off" else seconds(text)


def help_alone(context: typer.Context) -> None:
    """What a group of commands says if none of them is asked for."""
    if context.invoked_subcommand is None:
        output.out.print(context.get_help())


GUEST = Annotated[str, typer.Argument(help="Name or UUID of the guest.", autocompletion=guests)]
HOST = Annotated[
    str,
    typer.Argument(metavar="HOST", help="As hosts.yaml calls it.", autocompletion=hosts),
]
JOB = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Its id, the beginning of it, or its guest.",
        autocompletion=jobs,
    ),
]
INVENTORY = Annotated[
    Path | None,
    typer.Option(
        "--inventory", "-i", help="hosts.yaml; else VMCKPT_INVENTORY, ./hosts.yaml, the lab's."
    ),
]
POLICY = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="The policy; else the one that is for the guest."),
]
POLICIES = Annotated[
    Path | None,
    typer.Option(
        "--policies",
        metavar="DIR",
        help="Your own policies; else VMCKPT_POLICIES, policies next to hosts.yaml,"
        " /etc/vmckpt/policies.",
    ),
]
PROBE = Annotated[
    Seconds | None,
    typer.Option(
        parser=probe_time, metavar="TIME|off", help="How long the guest is measured before."
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout.")]
