"""Options and argument types that several commands share, and shell completion.

Completion must be fast and silent. If an error occurs, it offers no names; the command reports the
error.
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
"""Completion leaves out guests of hosts that do not answer within this time."""
_LATEST = 50
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:-]*")
"""Names that are completed. The shell inserts them unquoted, so they contain no shell syntax."""
Complete = Callable[[typer.Context, str], list[str]]


def _quietly(names: Callable[[typer.Context], Iterable[str]]) -> Complete:
    """Return a completion function that filters names by prefix and returns no names on errors."""

    @wraps(names)
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            found = {one for one in names(ctx) if one.startswith(incomplete)}
            return sorted(one for one in found if _PLAIN.fullmatch(one))
        except (VmckptError, OSError, TimeoutError):
            return []

    del complete.__wrapped__  # typer inspects the parameters of the wrapper
    return complete


def _inventory(ctx: typer.Context) -> "Inventory":
    from vmckpt.app import controller

    return controller.load_inventory(ctx.params.get("inventory"))


@_quietly
def hosts(ctx: typer.Context) -> Iterable[str]:
    """Return the names of the hosts in hosts.yaml, for completion."""
    return _inventory(ctx).hosts


@_quietly
def guests(ctx: typer.Context) -> Iterable[str]:
    """Return the names of guests on the hosts that answer within `_SOON`, for completion."""
    from vmckpt.app import fleet

    listing = asyncio.run(fleet.listing(_inventory(ctx), _SOON))
    return [guest.name for _, guest in listing.found]


@_quietly
def jobs(_: typer.Context) -> Iterable[str]:
    """Return running jobs and their guests, for completion; if there are none, the latest jobs."""
    from vmckpt.journal import jobs as journal_jobs

    with journal_jobs.open_journal(read_only=True) as journal:
        found = journal_jobs.jobs(journal)[:_LATEST]
        found = found or journal_jobs.jobs(journal, everything=True, limit=_LATEST)
    return [name for one in found for name in (one.operation.id, one.operation.guest)]


def seconds(text: str) -> Seconds:
    """Parse a time argument. Raises BadParameter if it is invalid or not greater than 0."""
    try:
        value = units.parse_seconds(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    if value <= 0:
        raise typer.BadParameter(f"{text!r}: must be greater than 0")
    return value


def rate(text: str) -> BytesPerSecond:
    """Parse a rate argument. Raises BadParameter if it is invalid."""
    try:
        return units.parse_rate(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None


def probe_time(text: str) -> Seconds:
    """Parse a time argument, or "off", which is 0. Raises BadParameter if it is invalid."""
    return Seconds(0.0) if text == "off" else seconds(text)


def help_alone(context: typer.Context) -> None:
    """Print the help of a group of commands if no command was given."""
    if context.invoked_subcommand is None:
        output.out.print(context.get_help())


GUEST = Annotated[
    str, typer.Argument(metavar="GUEST", help="Name or UUID of the guest.", autocompletion=guests)
]
HOST = Annotated[
    str,
    typer.Argument(metavar="HOST", help="Name of the host in hosts.yaml.", autocompletion=hosts),
]
JOB = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="ID or ID prefix of the job, or its guest.",
        autocompletion=jobs,
    ),
]
INVENTORY = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="Inventory file. Default: VMCKPT_INVENTORY, ./hosts.yaml or the lab's.",
    ),
]
POLICY = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="Policy. Default: the policy that matches the guest."),
]
POLICIES = Annotated[
    Path | None,
    typer.Option(
        "--policies",
        metavar="DIR",
        help="Directory of policies. Default: VMCKPT_POLICIES, policies next to hosts.yaml or"
        " /etc/vmckpt/policies.",
    ),
]
PROBE = Annotated[
    Seconds | None,
    typer.Option(
        parser=probe_time,
        metavar="TIME|off",
        help="How long to measure the guest's writes for the forecast.",
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON value to stdout.")]
