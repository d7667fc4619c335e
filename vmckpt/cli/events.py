"""vmckpt events: the events of all jobs, from the journal."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import seconds
from vmckpt.journal import wording
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.follow import Happening

_LOOK_EVERY = 0.5
_BACK = Seconds(3600.0)

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def events(
    about: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT", help="Only events of these guests, hosts or jobs. Default: all.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new events until Ctrl-C.")
    ] = False,
    since: Annotated[
        Seconds | None,
        typer.Option(
            parser=seconds, metavar="TIME",
            help="How far back to start, like 15min. Default: 1h, or now with --follow.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:  # fmt: skip
    """Show the events of all jobs in the journal.

    The events are those of all controllers that use the journal: migrations with each decision and
    its reason, snapshots, protections, evacuations, and the service. With --json, each line is an
    object with "at", "event" ("began", "ended", "decided", "phase-changed", ...), "job", "kind",
    "guest", "guest_uuid", "source", "target", "policy" and "values".

    Examples:

        vmckpt events --since 30min

        vmckpt events --follow --json

        vmckpt events web1 --follow
    """
    from vmckpt.journal import jobs
    from vmckpt.journal.follow import Follower

    with jobs.open_journal() as journal:
        back = since or (None if follow else _BACK)
        follower = Follower(journal, None if back is None else journal.now() - back)
        try:
            while True:
                for one in follower.look():
                    if not about or concerns(one, about):
                        _show(one, json=json)
                if not follow or output.out.quiet:  # quiet: the reader of the pipe is gone
                    return
                sys.stdout.flush()
                time.sleep(_LOOK_EVERY)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def concerns(one: "Happening", about: Sequence[str]) -> bool:
    """Return whether an event belongs to one of these guests, hosts or jobs."""
    operation = one.operation
    named = (
        operation.id, operation.guest, operation.guest_uuid, operation.source, operation.target,
        operation.detail.get("part_of"),
    )  # fmt: skip
    return any(word in named for word in about)


def _show(one: "Happening", *, json: bool) -> None:
    if json:
        output.print_json(one.as_json(), line=True)
    elif (text := one.text) is not None:
        operation = one.operation
        line = f"{wording.clock(one.at, time.time())} {operation.id} {operation.guest}: {text}"
        output.out.print(output.in_one_line(line), soft_wrap=True)
