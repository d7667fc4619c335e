"""Decide when the backup may run the guest. Pure.

Silence of the primary is never enough: a handover, the lease or a failover request decides. Silence
determines only when to ask the lease store, or to act on the request.
"""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import Seconds


class Step(StrEnum):
    """The next step of the backup."""

    WAIT = "wait"
    ASK = "ask"
    """Ask the lease store for the lease, which it grants once the primary's lease has expired."""
    RUN = "run"
    """Run the guest on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The facts that the backup knows now."""

    committed: int
    """The last committed epoch; 0: the standby is not consistent."""
    silent: Seconds
    """How long the primary has been silent."""
    has_lease: bool
    """There is a lease store, in which the primary's lease expires by itself."""
    automatic: bool
    person: bool
    """A failover was requested. For a guest that is being migrated, only the controller requests a
    failover, after it has confirmed that the source handed the guest over."""
    final: bool
    """The last committed epoch is the final epoch of a planned switchover."""
    handed_over: bool
    """The primary has reported that it handed the guest over."""
    moves: bool = False
    """The session is a migration. Output is not buffered, so the guest may run only from the final
    epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next step, and the reason for display."""

    step: Step
    why: str


def decide(seen: Seen, *, patience: Seconds) -> Decision:
    """Choose the next step.

    `patience`: how long the primary may be silent before the backup reacts.
    """
    if seen.committed == 0:
        return Decision(step=Step.WAIT, why="the standby has no complete epoch yet")
    if seen.handed_over and seen.final:
        return Decision(step=Step.RUN, why="the primary has handed the guest over")
    if seen.moves:
        return _move(seen)
    if seen.has_lease:
        return _by_lease(seen, patience)
    if seen.person and seen.silent > patience:
        return Decision(step=Step.RUN, why="the controller declared the primary dead")
    return Decision(step=Step.WAIT, why="there is no lease store, so a failover must be requested")


def _by_lease(seen: Seen, patience: Seconds) -> Decision:
    if seen.person or seen.final:
        why = "failover requested" if seen.person else "planned switchover"
        return Decision(step=Step.ASK, why=why)
    if not seen.automatic:
        return Decision(step=Step.WAIT, why="failover is left to the operator")
    if seen.silent > patience:
        return Decision(step=Step.ASK, why=f"the primary was silent for {seen.silent:.2f} s")
    return Decision(step=Step.WAIT, why="the primary is alive")


def _move(seen: Seen) -> Decision:
    """Decide for a guest that is being migrated, whose source has not reported the handover."""
    if seen.final and seen.person:
        return Decision(step=Step.RUN, why="the controller confirmed the source's handover")
    return Decision(step=Step.WAIT, why="the source has not handed the guest over")
