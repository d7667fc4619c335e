"""vmckpt dashboard."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY
from vmckpt.errors import BadInput, PolicyError

if TYPE_CHECKING:
    from vmckpt.policy.model import Policy
    from vmckpt.simulation.replay import Replayed
    from vmckpt.simulation.source import Showing

app = typer.Typer(name="dashboard", rich_markup_mode=None, add_completion=False)
_FLEET = "24x300"


@app.command()
def dashboard(
    fleet: Annotated[
        str | None,
        typer.Argument(metavar="[FLEET]", help=f"With --simulate: HOSTSxGUESTS; else {_FLEET}."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Hosts, guests and jobs are made up.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Play what migrate --trace has written.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Show it in a browser.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --serve.")] = 8010,
    host: Annotated[
        str, typer.Option(help="With --serve: the address to listen at.")
    ] = "127.0.0.1",
    url: Annotated[
        str | None, typer.Option(help="With --serve: how browsers see it, behind a proxy.")
    ] = None,
    inventory: INVENTORY = None,
) -> None:
    """Look at hosts, guests and jobs in the terminal, and act on them by keys.

    Everything that runs is shown, wherever it was begun; ? tells all keys. What is begun there is
    shown first as the command it is, with what would come of it, and goes on when the dashboard is
    closed. With --read-only (vmckpt --read-only dashboard) nothing can be begun.

    --serve prints an address with a token in it: whoever has that may do what you may do. It
    listens on this machine alone unless --host says otherwise, and speaks no TLS of its own.

    Examples:

        vmckpt dashboard

        vmckpt dashboard --simulate 1000x20000

        vmckpt dashboard --replay slow-night.jsonl

        vmckpt dashboard --serve --port 8010
    """
    from vmckpt import inventory as inventories

    if fleet is not None and not simulate:
        raise BadInput(f"{fleet!r}: hosts are made up with --simulate", hint="add --simulate")
    if simulate and replay is not None:
        raise BadInput("--simulate and --replay are two things", hint="say one of them")
    if inventory is not None:  # what is begun from there is to find it, too
        os.environ[inventories.VARIABLE] = str(inventory.absolute())
    if serve:
        _serve(fleet, replay, simulate=simulate, host=host, port=port, url=url)
        return
    if not (sys.stdout.isatty() or "TEXTUAL_DRIVER" in os.environ):
        raise BadInput("this is no terminal", hint="run it in one; scripts take vmckpt jobs --json")
    _show(fleet, replay, simulate=simulate)


def _serve(
    fleet: str | None, replay: Path | None, *, simulate: bool, host: str, port: int, url: str | None
) -> None:
    from vmckpt.app import controller
    from vmckpt_tui import web  # only who serves loads a web server

    # What is wrong with it is told here, not in a browser.
    if simulate or replay is not None:
        _made_up(fleet, replay)
    else:
        controller.load_inventory()
    words = ["dashboard"]
    words += ["--simulate", fleet or _FLEET] if simulate else []
    words += ["--replay", str(replay.absolute())] if replay is not None else []
    if host not in ("127.0.0.1", "::1", "localhost"):
        output.say(f"warning: {host} can be reached from outside; the token goes there in clear")
    web.serve(words, host=host, port=port, url=url, say=output.say)


def _made_up(
    fleet: str | None, replay: Path | None
) -> "tuple[Showing | Replayed, Sequence[Policy]]":
    """What stands for hosts and commands, and the policies. Raises BadInput."""
    from vmckpt.app import dashboard_source

    made = (
        dashboard_source.replayed(replay) if replay else dashboard_source.simulated(fleet or _FLEET)
    )
    return made, dashboard_source.policies()


def _show(fleet: str | None, replay: Path | None, *, simulate: bool) -> None:
    # The terminal toolkit is loaded by this command alone.
    from vmckpt import inventory as inventories
    from vmckpt.app import controller, policies
    from vmckpt.policy.loader import Shelf
    from vmckpt_tui import app as shown

    if simulate or replay is not None:
        made, shelf = _made_up(fleet, replay)
        shown.run(shown.Setting(source=made, commands=made, policies=shelf))
        return
    from vmckpt.app import dashboard_source, subprocesses
    from vmckpt.journal import controller_identity

    known = controller.load_inventory()
    try:
        found = policies.survey_policies(known)
    except PolicyError as exc:  # there is no such folder
        found = Shelf((), (str(exc),))
    place = {} if known.path is None else {inventories.VARIABLE: str(Path(known.path).absolute())}
    shown.run(
        shown.Setting(
            source=dashboard_source.Live(known), commands=subprocesses.Processes(place),
            policies=found.policies, wrong_policies=found.wrong,
            read_only=known.read_only, here=controller_identity.this_process().host,
        )
    )  # fmt: skip
