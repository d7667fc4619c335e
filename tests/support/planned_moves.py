"""Moves of a plan between hosts that have one link each."""

from tests.support.fleets import guest
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.plan.fleet import Rules
from vmckpt.units import BytesPerSecond

RULES = Rules(keep_free=0.0)
GBIT = BytesPerSecond(125_000_000)


def move(name: str, source: str, target: str, memory: float = 4, **more: object) -> Move:
    return Move(tenant=guest(name, source, memory, **more), source=source, target=target)
