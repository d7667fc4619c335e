"""vmckpt lab chaos: random migrations, random faults, and a check after each."""

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import JSON
from vmckpt.errors import BadInput, LabError
from vmckpt.lab import campaign, lab
from vmckpt.lab import chaos as plans
from vmckpt.lab.campaign import Campaign, Wrong
from vmckpt.lab.plan import LabPlan

_HOSTS = 3


def chaos(
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="For how long; 10 if nothing is said.")
    ] = None,
    operations: Annotated[int | None, typer.Option(min=1, help="How many operations.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="What all chance comes from.")] = None,
    first: Annotated[int, typer.Option(min=1, help="Leave out the operations before.")] = 1,
    postgres: Annotated[
        bool, typer.Option("--postgres", help="The journal in PostgreSQL, which fails, too.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Use that lab; else one of its own.")
    ] = None,
    json: JSON = False,
) -> None:
    """Shake a lab: random guests, migrations and faults, with a recovery and a check after each.

    The operations follow from the seed. It ends at the first thing that is wrong, says how to do
    the same again, and keeps journal and logs.

    Example:

        vmckpt lab chaos --minutes 10 --seed 7
    """
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    until = None if minutes is None and operations else time.monotonic() + (minutes or 10.0) * 60
    output.say(f"seed {seed}")
    with _lab(name, postgres=postgres) as plan:
        shaken = Campaign(plan, seed, output.say, journal=_journal(plan) if postgres else None)
        last = None if operations is None else first + operations - 1
        try:
            with shaken:
                for number in itertools.count(first):
                    late = until is not None and time.monotonic() > until
                    if late or (last is not None and number > last):
                        break
                    shaken.run(plans.operation(seed, number, postgres=postgres))
        except Wrong as exc:
            shaken.tally.failed = exc.message
            again = campaign.replay_command(seed, first, exc.operation, postgres=postgres)
            raise LabError(f"seed {seed}, {exc.message}", mend=f"do it again: {again}") from exc
        finally:
            if json:
                output.print_json(shaken.tally.as_json())
    if not json:
        _show(shaken.tally)


def _journal(plan: LabPlan) -> str:
    return f"postgresql://postgres@{plan.witness_address}/postgres"


@contextmanager
def _lab(name: str | None, *, postgres: bool) -> Iterator[LabPlan]:
    """The named lab, or one that is taken down afterwards."""
    if name is not None:
        found = lab.load(name)
        if found.host_count < _HOSTS or (postgres and not found.witness):
            raise BadInput(
                f"lab {name!r} is too small for this",
                mend=f"run vmckpt lab up --hosts {_HOSTS} --witness --name another",
            )
        yield found
        return
    own = f"chaos{os.getpid()}"
    try:
        yield lab.up(own, hosts=_HOSTS, with_witness=postgres)
    finally:
        lab.down(own)


def _show(tally: campaign.Tally) -> None:
    """For people."""
    shown = output.table("fault", ">times")
    for fault, times in sorted(tally.faults.items()):
        shown.add_row(fault, str(times))
    output.out.print(shown)
    each = tally.seconds / max(1, tally.operations)
    output.out.print(
        f"{tally.operations} operations, {each:.1f} s each; {tally.rightly_gone} guests rightly"
        f" gone; histories {tally.histories} of {tally.history_operations} answers, not"
        f" linearizable {tally.histories_broken}, unknown {tally.histories_unknown};"
        f" ledgers lost {tally.ledgers_lost}, two copies seen {tally.two_copies_seen},"
        f" unknown states left {tally.unknown_states_left}"
    )
