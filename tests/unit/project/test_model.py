"""The model of a protection: nothing is violated, and each fix that is taken back is missed."""

from collections.abc import Iterator

import pytest

from bench.model import alpha, beta, explore, reverted, starts
from bench.model.moves import Moves
from bench.model.reverted import Reverted
from bench.model.world import DEAD, GONE, OLD, RUNS, Budget, World

_STATES = 100_000
"""In all, over starts and ways."""
_NEAR = _STATES * 7 // 8 // len(starts.NAMES)
_FAR = _STATES // 8 // len(starts.NAMES)
_ENOUGH = 150_000
"""Within so many states each of them is found."""


@pytest.fixture(autouse=True)
def on_fakes() -> Iterator[None]:
    with alpha.on_fakes(), beta.on_fakes():
        yield


@pytest.mark.parametrize("name", starts.NAMES)
def test_nothing_is_violated_in_the_nearest_states(name: str) -> None:
    found = explore.search(starts.start(name, Budget()), Moves(), states=_NEAR)

    assert found.violation is None, found.trace
    assert found.states >= _NEAR


@pytest.mark.parametrize("name", starts.NAMES)
def test_nothing_is_violated_on_random_paths(name: str) -> None:
    found = explore.random_paths(starts.start(name, Budget()), Moves(), states=_FAR, seed=1)

    assert found.violation is None, found.trace
    assert found.states >= _FAR


@pytest.mark.parametrize("one", reverted.ALL, ids=lambda one: one.name)
def test_a_fix_that_is_taken_back_is_missed(one: Reverted) -> None:
    first = one.begins()
    with one.applied():
        found = explore.search(first, Moves(), states=_ENOUGH)

    assert found.violation is not None


def _followed(world: World, *labels: str) -> World:
    """The world after these, each the beginning of what happens. Raises StopIteration."""
    moves = Moves()
    for words in labels:
        world = next(new for label, new in moves(world) if label.startswith(words))
    return world


def test_a_guest_fails_over_in_the_model() -> None:
    """What the states are of: else nothing could be violated, and nothing would be shown."""
    asks = ("store: take_over wait", "beta: has")
    waits = ["a tick"] * OLD
    takes = ("store: take_over done", "beta: has", "beta: knows", "beta: start guest")
    world = _followed(
        starts.start("protected", Budget()), *asks, "fault: alpha loses power", *waits, *takes
    )

    assert (world.alpha.guest, world.beta.guest) == (DEAD, RUNS)


def test_a_protection_ends_in_the_model() -> None:
    ends = ("controller: end", "up: ('end'", "down: ('end'")
    world = _followed(starts.start("protected", Budget()), *ends)

    assert world.beta.guest == GONE
