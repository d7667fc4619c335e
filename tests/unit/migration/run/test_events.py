"""What a migration tells, and to whom."""

import asyncio

import pytest

from tests.support.engine_runs import ORDER, terms
from tests.support.fake_drivers import FakeMover
from vmckpt.migration.run.actions import PauseGuest
from vmckpt.migration.run.decide import Verdict
from vmckpt.migration.run.engine import Migration
from vmckpt.migration.run.events import EventEmitter
from vmckpt.model.events import Decided, Event, PhaseChanged
from vmckpt.model.migration import JobPhase, Outcome

# A run that does not end is an error, not a test that hangs.
pytestmark = pytest.mark.looptime(end=3000)


async def test_a_listener_that_fails_does_not_end_the_migration() -> None:
    def broken(_event: Event) -> None:
        raise OSError("the terminal is gone")

    ending = await Migration(FakeMover(), terms(), broken, asyncio.Event()).run(ORDER)

    assert ending.outcome is Outcome.COMPLETED


async def test_nobody_is_told_anything_after_a_listener_failed() -> None:
    told: list[Event] = []

    def broken(event: Event) -> None:
        told.append(event)
        raise OSError("the terminal is gone")

    emitter = EventEmitter(broken)
    emitter.enter(JobPhase.SETUP)
    emitter.decide("abort", "it takes too long", "mine")

    assert told == [PhaseChanged(phase=JobPhase.SETUP)]
    assert [one.action for one in emitter.decisions] == ["abort"]


async def test_phases_and_warnings_are_told_once_and_decisions_each_time() -> None:
    told: list[Event] = []
    emitter = EventEmitter(told.append)
    for _ in range(2):
        emitter.enter(JobPhase.PRE_COPY)
        emitter.warn("it is slow")
        emitter.verdict(
            Verdict(action=PauseGuest(), rule="mine", reason="no time", numbers={}), acted=False
        )

    assert [type(one) for one in told] == [PhaseChanged, Decided, Decided]
    assert emitter.warnings == ["it is slow"]
    last = emitter.decisions[-1]
    assert (last.action, last.rule, last.acted) == ("pause the guest", "mine", False)
