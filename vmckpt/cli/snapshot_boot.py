"""vmckpt snapshot verify --boot: snapshots that are brought to life to be proved."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import seconds
from vmckpt.cli.signals import stop_on_signals
from vmckpt.cli.snapshot_options import Ticker
from vmckpt.errors import BadInput, StoreDamaged
from vmckpt.units import Seconds, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.catalog import Identity
    from vmckpt.snapshot.verify.boot_test import Booted

BOOT = Annotated[
    bool,
    typer.Option("--boot", help="Restore them beside the original, and see whether they live."),
]
ON = Annotated[str | None, typer.Option(metavar="HOST", help="Where; else where they were taken.")]
SCRATCH = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="For their disks, there; else beside the guest's."),
]
FOR = Annotated[
    Seconds | None,
    typer.Option("--for", parser=seconds, metavar="TIME", help="How long each is watched; 10s."),
]


def boot(
    inventory: "controller.Inventory", store: str | None, words: Sequence[str],
    key: "Identity | None", *, on: str | None, scratch: Path | None, watch: Seconds | None,
) -> "tuple[Booted, ...]":  # fmt: skip
    """Bring them to life, one after the other; without words the newest of every guest."""
    from vmckpt.app import boot_test, controller
    from vmckpt.snapshot.verify.boot_test import WATCH

    if scratch is not None and not scratch.is_absolute():
        raise BadInput(f"--scratch {scratch}: say the whole path, as that host sees it")

    async def run() -> "tuple[Booted, ...]":
        stop = stop_on_signals("stopping: the restored guest will be taken away")
        caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
        return await boot_test.boot(
            inventory, store, words, caller,
            on=on, folder=None if scratch is None else str(scratch), watch=watch or WATCH,
            identity=key, each=_say,
        )  # fmt: skip

    return asyncio.run(run())


def _say(one: "Booted") -> None:
    word = "lives" if one.lives else "does not live"
    output.say(f"{one.snapshot} {one.name}: {word} on {one.host}: {one.why}")


def check(booted: "Sequence[Booted]") -> None:
    """Raises StoreDamaged if one of them did not come to life."""
    dead = [one for one in booted if not one.lives]
    if dead:
        more = f", and so are {len(dead) - 1} more" if len(dead) > 1 else ""
        raise StoreDamaged(
            f"{dead[0].snapshot} was restored on {dead[0].host}, and is dead: {dead[0].why}{more}",
            mend="look at an older snapshot, or at this one with --as and a console",
        )


def show(booted: "Sequence[Booted]") -> None:
    """What came of them, in a line."""
    alive = sum(one.lives for one in booted)
    took = show_seconds(Seconds(sum(one.took for one in booted)))
    output.out.print(f"{alive} of {len(booted)} came to life, in {took}; nothing of it is left")
