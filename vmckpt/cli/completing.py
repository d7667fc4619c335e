"""What a shell completes that only hosts.yaml, the hosts or the journal know.

Whoever presses TAB wants names soon or none: what is wrong is said by the command itself.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING

import typer

from vmckpt.errors import VmckptError
from vmckpt.units import Seconds

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
