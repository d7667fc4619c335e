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
        typer.Argument(metavar="FLEET", help=f"With --simulate: HOSTSxGUESTS. Default: {_FLEET}."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Show simulated hosts, guests and jobs.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Replay a file written by migrate --trace.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the dashboard over HTTP.")] = False,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="With --serve: port to listen on.")
    ] = 8010,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="With --serve: address to listen on.")
    ] = "127.0.0.1",
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="With --serve: public URL, if served behind a proxy."),
    ] = None,
    inventory: INVENTORY = None,
) -> None:
    """Show hosts, guests and jobs in the terminal, and act on them.

    The dashboard shows the running jobs of all controllers that use the journal. Press ? for the
    keys. Before the dashboard starts a job, it shows the command and the expected effect. Such jobs
    keep running when the dashboard is closed. To forbid actions, use vmckpt --read-only dashboard.

    --serve prints an address that contains a token. Everyone with this address has your
    permissions, so keep it secret. The server listens only on this machine unless --host sets
    another address. It does not use TLS.

    Examples:

        vmckpt dashboard

        vmckpt dashboard --simulate 1000x20000

        vmckpt dashboard --replay slow-night.jsonl

        vmckpt dashboard --serve --port 8010
    """
    from vmckpt import inventory as inventories

    if fleet is not None and not simulate:
        raise BadInput(f"a fleet size ({fleet}) requires --simulate", hint="add --simulate")
    if simulate and replay is not None:
        raise BadInput("--simulate and --replay are mutually exclusive", hint="use one of them")
    if inventory is not None:  # commands that the dashboard starts must use this inventory, too
        os.environ[inventories.VARIABLE] = str(inventory.absolute())
    if serve:
        _serve(fleet, replay, simulate=simulate, host=host, port=port, url=url)
        return
    if "TEXTUAL_DRIVER" in os.environ:
        from vmckpt_tui import web

        web.end_with_server()
    elif not sys.stdout.isatty():
        raise BadInput(
            "stdout is not a terminal",
            hint="run the dashboard in a terminal, or use vmckpt jobs --json in scripts",
        )
    _show(fleet, replay, simulate=simulate)


def _serve(
    fleet: str | None, replay: Path | None, *, simulate: bool, host: str, port: int, url: str | None
) -> None:
    from vmckpt.app import controller
    from vmckpt_tui import web  # only --serve loads the web server

    # Errors are reported here rather than in a browser.
    if simulate or replay is not None:
        _made_up(fleet, replay)
    else:
        controller.load_inventory()
    words = ["dashboard"]
    words += ["--simulate", fleet or _FLEET] if simulate else []
    words += ["--replay", str(replay.absolute())] if replay is not None else []
    if host not in ("127.0.0.1", "::1", "localhost"):
        output.say(f"warning: {host} is reachable from outside; the token is sent unencrypted")
    web.serve(words, host=host, port=port, url=url, say=output.say)


def _made_up(
    fleet: str | None, replay: Path | None
) -> "tuple[Showing | Replayed, Sequence[Policy]]":
    """Return the source of simulated or replayed data, and the policies.

    Raises BadInput, and PolicyError if VMCKPT_POLICIES names no directory.
    """
    from vmckpt.app import dashboard_source

    made = (
        dashboard_source.replayed(replay) if replay else dashboard_source.simulated(fleet or _FLEET)
    )
    return made, dashboard_source.policies()


def _show(fleet: str | None, replay: Path | None, *, simulate: bool) -> None:
    # Only this command loads the terminal toolkit.
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
    except PolicyError as exc:  # the directory does not exist
        found = Shelf((), (str(exc),))
    place = {} if known.path is None else {inventories.VARIABLE: str(Path(known.path).absolute())}
    shown.run(
        shown.Setting(
            source=dashboard_source.Live(known), commands=subprocesses.Processes(place),
            policies=found.policies, wrong_policies=found.wrong,
            read_only=known.read_only, here=controller_identity.this_process().host,
        )
    )  # fmt: skip
