"""Explore the model's worlds: all worlds in order of distance, or along random paths."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.model.effects import Violation
from bench.model.world import World

Successors = Callable[[World], Iterable[tuple[str, World]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of an exploration."""

    states: int
    """Number of different worlds that were visited."""
    steps: int
    """Number of transitions."""
    violation: str | None
    trace: tuple[str, ...]
    """The steps that led to the violation."""
    complete: bool
    """Whether all worlds within the budget of faults were visited."""


def search(start: World, successors: Successors, *, states: int) -> Found:
    """Visit all worlds, until `states` worlds are known or an invariant is violated.

    Alternates between the nearest world, and the nearest of the worlds with the most faults.
    """
    came: dict[World, tuple[World, str] | None] = {start: None}
    nearest, worst = deque([(0, start)]), [(0, 0, 0, start)]
    left, steps, turn = {start}, 0, 0
    while left and len(came) < states:
        turn += 1
        if turn % 2:
            depth, world = nearest.popleft()
        else:
            _, depth, _, world = heapq.heappop(worst)
        if world not in left:
            continue
        left.remove(world)
        try:
            for label, new in successors(world):
                steps += 1
                if new not in came:
                    came[new] = (world, label)
                    left.add(new)
                    nearest.append((depth + 1, new))
                    heapq.heappush(worst, (sum(new.budget), depth + 1, len(came), new))
        except Violation as exc:
            return Found(
                states=len(came), steps=steps, violation=str(exc), trace=_trace(came, world),
                complete=False,
            )  # fmt: skip
    return Found(states=len(came), steps=steps, violation=None, trace=(), complete=not left)


def _trace(came: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    labels = []
    while (before := came[world]) is not None:
        world, label = before
        labels.append(label)
    return tuple(reversed(labels))


def random_paths(
    start: World, successors: Successors, *, states: int, seed: int, longest: int = 400
) -> Found:
    """Follow random paths from the start. They lead far if not all worlds can be visited."""
    chance = random.Random(seed)
    seen, steps = {hash(start)}, 0
    while len(seen) < states:
        world = start
        labels: list[str] = []
        for _ in range(longest):
            try:
                moves = list(successors(world))
            except Violation as exc:
                return Found(
                    states=len(seen), steps=steps, violation=str(exc), trace=tuple(labels),
                    complete=False,
                )  # fmt: skip
            if not moves:
                break
            label, world = chance.choice(moves)
            labels.append(label)
            seen.add(hash(world))
            steps += 1
    return Found(states=len(seen), steps=steps, violation=None, trace=(), complete=False)
