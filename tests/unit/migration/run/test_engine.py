"""A migration from its order to its end, against a driver that does as it is told."""

import pytest

from tests.support.builders import sample
from tests.support.engine_runs import phases, run
from tests.support.fake_drivers import GONE, MOVING, PAUSED, RUNS, SILENT, FakeMover, refusal
from vmckpt.errors import MigrationRefused, OutcomeUnknown, PeerLoginFailed
from vmckpt.migration.run.engine import PATIENCE
from vmckpt.migration.run.progress import INTERVAL
from vmckpt.model.events import Decided, Event, Sampled
from vmckpt.model.migration import Driver, JobPhase, Outcome
from vmckpt.units import MIB

# A run that does not end is an error, not a test that hangs.
pytestmark = pytest.mark.looptime(end=3000)

LOST = OutcomeUnknown("alpha: the connection broke", host="alpha")


async def test_a_migration_that_goes_well_is_complete() -> None:
    migrations = FakeMover(lasts=3.0)
    ending = await run(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert ending.totals == migrations.statistics
    assert migrations.calls == ["downtime 0.1", "move peer-to-peer", "forget source"]
    assert ending.elapsed == pytest.approx(3.0, abs=0.2)


async def test_samples_and_phases_are_told_as_they_come() -> None:
    events: list[Event] = []
    migrations = FakeMover(lasts=3.5 * INTERVAL, samples=[
        sample(iteration=0, total=0), sample(iteration=1), sample(iteration=2),
        sample(iteration=2, phase=JobPhase.SWITCHOVER),
    ])  # fmt: skip
    ending = await run(migrations, events=events)

    assert phases(events) == [
        JobPhase.SETUP, JobPhase.PRE_COPY, JobPhase.SWITCHOVER, JobPhase.CLEANUP, JobPhase.DONE,
    ]  # fmt: skip
    assert [s.iteration for s in ending.samples] == [1, 2, 2]
    shares = [event.done for event in events if isinstance(event, Sampled)]
    assert shares == sorted(shares)


async def test_the_operators_stop_aborts_and_ends_on_the_source() -> None:
    events: list[Event] = []
    migrations = FakeMover(lasts=1000, samples=[sample(iteration=4, remaining=9 * MIB)])
    ending = await run(migrations, stops=(2.0,), events=events)

    assert ending.outcome is Outcome.CANCELLED
    assert migrations.calls == ["downtime 0.1", "move peer-to-peer", "abort", "downtime 0.3"]
    assert [d.action for d in ending.decisions] == ["abort"]
    assert ending.decisions[0].numbers["remaining"] == 9 * MIB
    assert sum(isinstance(event, Decided) for event in events) == 1


async def test_an_abort_that_came_too_early_is_given_again() -> None:
    migrations = FakeMover(lasts=1000, aborts_ignored=2)
    ending = await run(migrations, stops=(0.0,))

    assert ending.outcome is Outcome.CANCELLED
    assert migrations.calls.count("abort") == 3
    assert len(ending.decisions) == 1


async def test_a_stop_that_came_too_late_is_said_and_changes_nothing() -> None:
    migrations = FakeMover(lasts=1.0, aborts_ignored=99)
    ending = await run(migrations, stops=(0.5,))

    assert ending.outcome is Outcome.COMPLETED
    assert "before it could be stopped" in ending.warnings[0]


async def test_the_time_limit_aborts() -> None:
    migrations = FakeMover(lasts=1000)
    ending = await run(migrations, timeout=5.0)

    assert ending.outcome is Outcome.TIMED_OUT
    assert ending.elapsed == pytest.approx(5.3, abs=0.2)


async def test_a_failure_is_told_in_libvirts_words_and_the_limit_set_back() -> None:
    migrations = FakeMover(errors=[refusal("migration: no room")])
    ending = await run(migrations)

    assert (ending.outcome, ending.error) == (Outcome.FAILED, "alpha: migration: no room")
    assert migrations.calls[-1] == "downtime 0.3"


@pytest.mark.parametrize(("of_guest", "side"), [(True, "guest"), (False, "target")])
async def test_a_refusal_names_the_side_that_is_the_reason(of_guest: bool, side: str) -> None:
    refused = MigrationRefused("alpha: migration: no", host="alpha")
    refused.of_guest = of_guest

    assert (await run(FakeMover(errors=[refused]))).refused == side
    assert (await run(FakeMover(errors=[refusal("migration: no room")]))).refused is None


async def test_a_source_that_cannot_log_in_at_the_target_lets_the_client_drive() -> None:
    migrations = FakeMover(errors=[PeerLoginFailed("alpha: no route", host="alpha")])
    ending = await run(migrations)

    assert (ending.outcome, ending.driver) == (Outcome.COMPLETED, Driver.CLIENT)
    assert [d.action for d in ending.decisions] == ["client-driven"]
    assert migrations.calls[1:3] == ["move peer-to-peer", "move client-driven"]


async def test_a_broken_call_is_no_failure_the_hosts_are_asked() -> None:
    migrations = FakeMover(
        errors=[LOST], presences=[(MOVING, PAUSED), (PAUSED, PAUSED), (GONE, RUNS)]
    )
    ending = await run(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert ending.error is None


async def test_a_job_that_outlives_our_call_is_followed_and_can_be_stopped() -> None:
    migrations = FakeMover(errors=[LOST], presences=[(MOVING, PAUSED)] * 400 + [(RUNS, GONE)])
    ending = await run(migrations, stops=(60.0,))

    assert ending.outcome is Outcome.CANCELLED
    assert "abort" in migrations.calls


async def test_when_hosts_stay_silent_the_outcome_is_not_guessed() -> None:
    migrations = FakeMover(lasts=1.0, errors=[LOST], presences=[(SILENT, RUNS)])
    ending = await run(migrations)

    assert ending.outcome is Outcome.UNKNOWN
    assert ending.elapsed >= PATIENCE
    assert ending.warnings == ("the source reports nothing, the target running",)


async def test_missing_final_statistics_are_said_not_invented() -> None:
    ending = await run(FakeMover(statistics=None))

    assert (ending.outcome, ending.totals) == (Outcome.COMPLETED, None)
    assert "downtime is unknown" in ending.warnings[0]


async def test_passes_of_an_earlier_cancelled_job_are_not_counted() -> None:
    migrations = FakeMover(lasts=3.5 * INTERVAL, samples=[
        sample(iteration=5, total=0), sample(iteration=6), sample(iteration=7),
    ])  # fmt: skip
    ending = await run(migrations)

    assert [s.iteration for s in ending.samples] == [1, 2, 2]


async def test_a_guest_that_ends_on_the_way_is_said_to_run_nowhere() -> None:
    migrations = FakeMover(errors=[refusal("gone")])
    migrations.presences = [(GONE, GONE)]

    assert (await run(migrations)).outcome is Outcome.SHUT_OFF
