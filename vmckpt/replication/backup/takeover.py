"""When the backup may run the guest. Pure.

Silence never decides: a lease does, or a person. Silence only says when to ask.
"""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import Seconds


class Step(StrEnum):
    """What the backup does next."""

    WAIT = "wait"
    ASK = "ask"
    """Ask the lease store whether the primary's lease has run out."""
    RUN = "run"
    """The guest is ours: let it run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the backup knows just now."""

    committed: int
    """The last epoch committed; 0: the standby is nothing whole."""
    silent: Seconds
    """For how long nothing has come from the primary."""
    has_lease: bool
    """There is a lease store, in which the primary's lease runs out by itself."""
    automatic: bool
    person: bool
    """Somebody asked for a failover; of a guest that moves its controller alone, once it knows that
    the source has given it away."""
    final: bool
    """The last epoch committed was the final one of a planned switch."""
    handed_over: bool
    """The primary has said that the guest is ours."""
    moves: bool = False
    """It is a migration: output is not held, so no epoch but the final one may ever run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done, and why."""

    step: Step
    why: str


def decide(seen: Seen, *, patience: Seconds) -> Decision:
    """`patience`: so long a silence is ordinary."""
    if seen.committed == 0:
        return Decision(step=Step.WAIT, why="the standby has no whole epoch yet")
    if seen.handed_over and seen.final:
        return Decision(step=Step.RUN, why="the primary has handed the guest over")
    if seen.moves:
        return _move(seen)
    if seen.has_lease:
        return _by_lease(seen, patience)
    if seen.person and seen.silent > patience:
        return Decision(step=Step.RUN, why="a person said that the primary is dead")
    return Decision(step=Step.WAIT, why="without a lease store only a person can tell")


def _by_lease(seen: Seen, patience: Seconds) -> Decision:
    if seen.person or seen.final:
        return Decision(step=Step.ASK, why="a person asked" if seen.person else "a switch")
    if not seen.automatic:
        return Decision(step=Step.WAIT, why="failover is left to a person")
    if seen.silent > patience:
        return Decision(step=Step.ASK, why=f"silent for {seen.silent:.2f} s")
    return Decision(step=Step.WAIT, why="the primary lives")


def _move(seen: Seen) -> Decision:
    """Of a guest that moves, whose source has not said itself that it is ours."""
    if seen.final and seen.person:
        return Decision(step=Step.RUN, why="its controller has seen that it was handed over")
    return Decision(step=Step.WAIT, why="only its source can give a guest away that moves")
