"""vmckpt recover."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, POLICIES
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.progress import line
from vmckpt.errors import InventoryError, OutcomeUnknown, TwoCopies
from vmckpt.model import guest
from vmckpt.model.events import Decided, Event, PhaseChanged, Sampled
from vmckpt.model.guest import Copies
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.recovery import Recovered

_ANSWERS = Seconds(3.0)
"""A host that does not answer within this time is omitted from the search for two copies."""


def recover(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the state of jobs, and what would be done.")
    ] = False,
    forget: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Mark this job as ended; contact no host. You must know where the guest is.",
        ),
    ] = None,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Recover interrupted jobs: finish or undo them.

    Use this command after vmckpt was killed, a host died or the network failed. For every job
    without a live controller, the command asks both hosts where the guest is, and then finishes or
    undoes the job. While a host that may have the guest does not answer, nothing is changed. A
    migration that is still running is watched until it ends; Ctrl-C stops watching, and the
    migration continues. Finally, the command checks whether a guest is running on two hosts. vmckpt
    migrate also recovers jobs before it starts, but does not watch running migrations.

    Exit codes: 27 if a guest is running on two hosts, 13 if a job could not be recovered.

    Examples:

        vmckpt recover --dry-run

        vmckpt recover --json

        vmckpt recover --forget m-7k3f
    """
    from vmckpt.app import controller, migration

    twice: Sequence[Copies] = ()
    if forget is not None:
        if dry_run:
            raise typer.BadParameter("--forget and --dry-run are mutually exclusive")
        found = [migration.forget(lambda: controller.load_inventory(inventory), forget)]
    else:
        found, twice = asyncio.run(_run(inventory, policies, dry_run))
    if json:
        output.print_json([one.as_json() for one in found])
    elif found:
        _show(found, dry_run)
    else:
        output.say("nothing to recover: every job has ended or has a live controller")
    _complain(found, twice)


def _complain(found: "list[Recovered]", twice: Sequence[Copies]) -> None:
    """Raise TwoCopies if a guest is on two hosts, OutcomeUnknown if a job was not recovered."""
    second = [one for one in found if one.settled.two_copies and one.settled.outcome is None]
    if second:
        raise TwoCopies(
            "; ".join(one.settled.truth for one in second), hint=second[0].settled.settle or None
        )
    if twice:
        raise guest.error(twice)
    unknown = [one for one in found if one.settled.outcome is None and not one.settled.goes_on]
    if unknown:
        jobs = ", ".join(one.operation.id for one in unknown)
        raise OutcomeUnknown(
            f"{jobs}: cannot be recovered now",
            host=unknown[0].operation.source or "",
            hint=unknown[0].settled.settle or None,
        )


async def _run(
    inventory: Path | None, folder: Path | None, dry_run: bool
) -> "tuple[list[Recovered], Sequence[Copies]]":
    from vmckpt.app import controller, fleet, migration
    from vmckpt.app import policies as app_policies

    known = controller.load_inventory(inventory)
    policies = app_policies.survey_policies(known, folder).policies
    stop = stop_on_signals("stopping: running migrations continue without vmckpt")
    caller = controller.Caller(emit=_Log().take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=known, policies=policies, caller=caller)
    found = await migration.recover(acting, dry_run=dry_run)
    try:
        return found, await fleet.copies(known, within=_ANSWERS)
    except InventoryError as exc:  # what was recovered is shown all the same
        caller.warn(str(exc))
        return found, ()


class _Log:
    """Progress as log lines, with at most one sample per second."""

    def __init__(self) -> None:
        self._logged = 0.0

    def take(self, event: Event) -> None:
        match event:
            case PhaseChanged():
                output.say(f"phase={event.phase}")
            case Decided():
                output.say(f"decided action={event.decision.action} ({event.decision.reason})")
            case Sampled() if time.monotonic() - self._logged >= 1.0:
                self._logged = time.monotonic()
                output.say(line(event))
            case _:
                pass


def _show(found: "list[Recovered]", dry_run: bool) -> None:
    for one in found:
        settled, job = one.settled, one.operation
        output.out.print(output.styled("bold", job.id), f"{job.guest}, {job.way}: {settled.truth}")
        done = not dry_run and (settled.outcome is not None or settled.goes_on)
        for did in settled.did:
            output.out.print(f"    {'done' if done else 'would do'}: {did}")
        if settled.outcome is not None:
            output.out.print(f"    {'would end' if dry_run else 'ended'} as {settled.outcome}")
        if settled.settle and not settled.goes_on:
            output.out.print(f"    next step: {settled.settle}")
        for warning in settled.warnings:
            output.out.print(f"    warning: {warning}")
