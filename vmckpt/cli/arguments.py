"""Options and argument types that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from vmckpt import units
from vmckpt.cli import completing, output
from vmckpt.units import BytesPerSecond, Seconds


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


GUEST = Annotated[
    str, typer.Argument(help="Name or UUID of the guest.", autocompletion=completing.guests)
]
HOST = Annotated[
    str,
    typer.Argument(metavar="HOST", help="As hosts.yaml calls it.", autocompletion=completing.hosts),
]
JOB = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Its id, the beginning of it, or its guest.",
        autocompletion=completing.jobs,
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
