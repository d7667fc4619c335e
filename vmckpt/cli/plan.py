"""vmckpt plan and vmckpt policy replay: what a migration would do, or would have done."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON, POLICIES, POLICY, PROBE
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.progress import Progress
from vmckpt.errors import Blocked
from vmckpt.model.finding import Severity
from vmckpt.model.host import Host
from vmckpt.model.migration import Mode
from vmckpt.units import Seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from vmckpt.migration.forecast.forecast import Forecast, Range
    from vmckpt.migration.plan.planner import Plan
    from vmckpt.migration.request import MigrateRequest

_LOOK = Seconds(10.0)


def plan(
    guest: GUEST,
    to: Annotated[
        str,
        typer.Option("--to", metavar="HOST", help="Target host.", autocompletion=arguments.hosts),
    ],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST",
            help="Source host. Default: the host that runs the guest.",
            autocompletion=arguments.hosts,
        ),
    ] = None,
    policy: POLICY = None,
    policies: POLICIES = None,
    mode: Annotated[Mode | None, typer.Option(help="Override the policy's mode.")] = None,
    probe: PROBE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show what a migration would do, without changing anything.

    The command shows all blockers, the policy that applies to the guest, and a forecast for each
    mode: the duration, the downtime and the bytes sent, as ranges. It measures the guest's writes
    for up to ten seconds if one second is not enough for a good forecast.

    Example:

        vmckpt plan web1 --to beta
    """
    from vmckpt.migration.request import MigrateRequest, PolicyOverrides

    request = MigrateRequest(
        guest=guest,
        to=to,
        from_=from_,
        policy=policy,
        overrides=PolicyOverrides(mode=mode),
        dry_run=True,
        probe=_LOOK if probe is None else probe,
    )
    made, source, target = asyncio.run(_plan(request, inventory, policies))
    if json:
        output.print_json(_as_json(made, source, target))
    else:
        _show(made, source, target)
    if made.blocked:
        raise Blocked(
            f"{guest} cannot move to {to}", hint="see the findings above; nothing was changed"
        )


async def _plan(
    request: "MigrateRequest", inventory: Path | None, folder: Path | None
) -> "tuple[Plan, Host, Host]":
    from vmckpt.app import controller, migration
    from vmckpt.app import policies as app_policies

    known = controller.load_inventory(inventory)
    shelf, forced = app_policies.load_policies(known, folder, request.policy)
    stop = stop_on_signals("stopping")
    with Progress(f"plan {request.guest} → {request.to}", warnings=False) as progress:
        caller = controller.Caller(emit=progress.take, warn=output.say, stop=stop)
        acting = controller.Controller(inventory=known, policies=shelf, caller=caller)
        return await migration.plan(acting, dataclasses.replace(request, policy=forced))


def _as_json(made: "Plan", source: Host, target: Host) -> dict[str, Any]:
    from vmckpt.policy import explain

    guest, outlook = made.facts.guest, made.outlook
    return {
        "guest": guest.name if guest is not None else made.facts.name,
        "source": source.name,
        "target": target.name,
        "possible": not made.blocked,
        "findings": [finding.as_json() for finding in made.findings],
        "policy": None if made.policy is None else made.policy.name,
        "why": [] if made.chosen is None else list(explain.choice(made.chosen)),
        "mode": str(made.mode),
        "reason": made.reason,
        "post_copy": made.post_copy,
        "encrypted": made.tls_name is not None or made.mode is Mode.CHECKPOINT,
        "copied_disks": list(made.copies.disks),
        "facts": None if outlook is None else outlook.facts.as_json(),
        "forecasts": [] if outlook is None else [one.as_json() for one in outlook.forecasts],
    }


def _show(made: "Plan", source: Host, target: Host) -> None:
    from vmckpt.migration.forecast import forecast
    from vmckpt.policy import explain

    output.findings(output.out, [f for f in made.findings if f.severity is not Severity.OK])
    if made.chosen is None or made.facts.guest is None:
        return
    name = output.styled("bold", made.facts.guest.name)
    output.out.print(name, f": {source.name} → {target.name}", sep="")
    output.out.print(f"policy {explain.choice(made.chosen)[0]}")
    output.out.print(f"mode {made.mode}: {made.reason}")
    if made.outlook is None:
        return
    table = output.table("mode", ">total", ">downtime", ">sent", "")
    table.columns[0].min_width = max(len(mode) for mode in Mode)  # never shorten the mode
    for one in (mode.shown() for mode in made.outlook.forecasts):
        table.add_row(
            str(one.mode),
            _range(one.total, show_seconds),
            _range(one.downtime, show_seconds),
            _range(one.sent, show_bytes),
            _verdict(one),
        )
    output.out.print(table)
    chosen = made.outlook.of(made.mode)
    for planned in chosen.planned if chosen is not None else ():
        at = show_seconds(planned.at)
        output.out.print(f"after about {at}: {planned.action}, because {planned.reason}")
    curve = forecast.curve_in_words(made.outlook.facts)
    output.out.print(f"the guest: {curve}")
    for line in made.outlook.facts.basis:
        if not line.startswith(curve):
            output.out.print(f"based on: {line}")


def _range(span: "Range | None", show: Callable[[float], str]) -> str:
    return "never ends" if span is None else span.show(show)


def _verdict(one: "Forecast") -> str:
    if one.converges is None:
        return "might not complete"
    if not one.converges:
        return "does not complete"
    return "completes by post-copy" if one.switches else ""


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace written by vmckpt migrate --trace FILE.")
    ],
    policy: POLICY = None,
    policies: POLICIES = None,
    mode: Annotated[Mode | None, typer.Option(help="Override the policy's mode.")] = None,
    json: JSON = False,
) -> None:
    """Show what a policy would have done in a recorded migration.

    The recording is followed for as long as the policy makes the recorded decisions. From the first
    different decision onwards, the migration is simulated.

    Example:

        vmckpt policy replay slow-night.jsonl --policy must-finish
    """
    from vmckpt.app import migration

    told = migration.replay(file, policies, policy, mode)
    if json:
        output.print_json(told.as_json())
        return
    say = output.out.print
    before = f"{told.recorded_policy}, {told.outcome or 'incomplete'}"
    say(f"{told.guest} under policy {told.policy}, mode {told.mode} (recorded: {before})")
    for one in told.result.decided:
        say(f"at {show_seconds(one.at)}: {one.action}, because {one.reason}")
    if told.result.differs_at is None:
        say("all decisions match the recording")
        return
    did = told.result.recorded or "no decision"
    say(f"decisions differ from {show_seconds(told.result.differs_at)} onwards; recorded: {did}")
    if (then := told.result.then) is not None:
        for one in then.planned:
            say(f"at about {show_seconds(one.at)}: {one.action}, because {one.reason}")
        end = "completes" if then.completed else "ends without completing"
        say(f"the migration {end} after about {show_seconds(then.total)}")
