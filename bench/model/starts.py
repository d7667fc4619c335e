"""The worlds in which explorations begin, after a life without faults."""

from collections import deque
from collections.abc import Callable

from bench.model.moves import Moves
from bench.model.world import Budget, World

QUIET = Budget(
    agents=0,
    watchdogs=0,
    backups=0,
    crashes=0,
    cuts=0,
    silences=0,
    drifts=0,
    orders=0,
    resumes=0,
    cards=0,
    promotions=0,
    moments=1,
)
"""A budget without faults."""
_SLOW = ("a tick", "keep", "beta: poll", "store: take_over")
"""Beginnings of labels of steps that are not needed to reach a start."""


def _committed(world: World) -> bool:
    """Return whether the standby has its first epoch, but the lease store does not know yet."""
    return bool(world.link.down) and world.link.down[0][0] == "ack"


def _protected(world: World) -> bool:
    """Return whether the first epoch's output is released, and the next epoch may begin."""
    agent = world.alpha.agent
    return (
        world.lease.state == "protected" and agent is not None
        and agent.at == "serve" and agent.main is None
    )  # fmt: skip


def _sent(world: World) -> bool:
    """Return whether a later epoch is in transit."""
    up = world.link.up
    return bool(up) and up[0][0] == "seal" and world.beta.epoch > 0


def _renewed(world: World) -> bool:
    """Return whether the answer to the renewal before the standby's validation is in transit."""
    agent = world.alpha.agent
    return (
        world.beta.epoch > 0 and world.lease.state == "held" and agent is not None
        and agent.lock == "main" and agent.main is not None
        and agent.main.answers[-1][0] == "told"
        and dict(agent.main.answers[-1][1]).items() >= {"said": "done", "state": "held"}.items()
    )  # fmt: skip


_REACHED: dict[str, Callable[[World], bool]] = {
    "begin": lambda _: True, "committed": _committed, "protected": _protected, "sent": _sent,
    "renewed": _renewed,
}  # fmt: skip
NAMES = tuple(_REACHED)


def start(name: str, budget: Budget) -> World:
    """Return the nearest world of a kind. `budget`: the faults that may occur from then on.

    Raises LookupError if no world of this kind is reached.
    """
    moves, first = Moves(), World(budget=QUIET._replace(moments=2))
    seen, waiting = {first}, deque([first])
    while waiting:
        world = waiting.popleft()
        if _REACHED[name](world):
            return world._replace(budget=budget)
        for label, new in moves(world):
            if not label.startswith(_SLOW) and new not in seen:
                seen.add(new)
                waiting.append(new)
    raise LookupError(f"the model never reaches '{name}'")
