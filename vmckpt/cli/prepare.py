"""vmckpt prepare."""

import asyncio
from typing import TYPE_CHECKING

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON
from vmckpt.cli.snapshot_options import DRY_RUN, YES, sure
from vmckpt.model.events import Event

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.prepare import Readiness

app = typer.Typer(name="prepare", rich_markup_mode=None, add_completion=False)


@app.command()
def prepare(
    guest: GUEST,
    dry_run: DRY_RUN = False,
    yes: YES = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Make a guest ready for fast snapshots and for replication.

    Says what is ready, and changes the rest in its stored definition: memory that its host can map,
    an id that tells it when it was restored, cards whose output can be held back. A guest that runs
    stays as it is until it was shut down and started. Images are not converted: it says how.

    Examples:

        vmckpt prepare web1 --dry-run

        vmckpt prepare web1 --yes --json
    """
    from vmckpt.app import controller, hosts

    known = controller.load_inventory(inventory)
    found = asyncio.run(hosts.look(known, guest))
    if found.lacks and not dry_run:
        if not json:
            output.findings(output.out, found.findings)
        sure(f"change the stored definition of {found.guest} on {found.host}?", yes=yes)
        found = asyncio.run(_make_ready(known, guest))
    elif not json:
        output.findings(output.out, found.findings)
    if json:
        output.print_json(found.as_json())
    else:
        output.out.print(_in_words(found, dry_run=dry_run))


async def _make_ready(inventory: "controller.Inventory", guest: str) -> "Readiness":
    from vmckpt.app import controller, hosts

    def unheard(_: Event) -> None:
        """It is over before anybody could read."""

    caller = controller.Caller(emit=unheard, warn=output.say, stop=asyncio.Event())
    return await hosts.make_ready(inventory, guest, caller)


def _in_words(found: "Readiness", *, dry_run: bool) -> str:
    if found.changed:
        done = f"the definition of {found.guest} on {found.host} was changed"
    elif found.lacks:
        done = f"the definition of {found.guest} on {found.host} would be changed"
    else:
        done = f"the definition of {found.guest} on {found.host} is as it should be"
    if found.restart:
        then = "would be" if dry_run and found.lacks else "is"
        return f"{done}; it {then} so once {found.guest} was shut down and started"
    return done
