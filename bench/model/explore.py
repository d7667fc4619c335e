"""Walks through the model's worlds: all of them in order of distance, or random paths."""

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
    """What came of a walk."""

    states: int
    """Different worlds that were seen."""
    steps: int
    """Transitions that were taken."""
    violation: str | None
    trace: tuple[str, ...]
    """What happened up to it."""
    complete: bool
    """There is no world within the budget of faults that was not seen."""


def search(start: World, successors: Successors, *, states: int) -> Found:
    """All worlds, until there are `states` of them or something is violated.

    By turns the nearest one comes next, and of those in which the most has gone wrong the nearest.
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
    """Random paths from the start: they come far where not all can be seen."""
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
