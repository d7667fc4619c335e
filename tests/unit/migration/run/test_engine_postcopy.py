"""Post-copy on simulated time: nothing that happens may end either part of the guest."""

import asyncio
import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.support.engine_runs import (
    ENDS_A_PART,
    HYBRID,
    after_the_switch,
    phases,
    run,
    terms,
    told,
)
from tests.support.fake_drivers import FakeDesk, FakeHosts
from tests.support.simulated import Machine, Writer
from vmckpt.errors import HypervisorError, OutcomeUnknown
from vmckpt.journal.records import RequestKind
from vmckpt.migration import request as contract
from vmckpt.migration.run.engine import Ending, Migration
from vmckpt.model.events import Event
from vmckpt.model.migration import JobPhase, Mode, Outcome
from vmckpt.units import MIB, Seconds

# A run that does not end is an error, not a test that hangs.
pytestmark = pytest.mark.looptime(end=3000)

# Switches in the second pass, after some 10 s, and needs 5 s more.
RULE = "{name: now, when: {iteration: 2}, do: start_postcopy}"
UNDER = terms(RULE, mode=Mode.HYBRID)
GOES_ON = ("post-copy", "post-copy continues")
KEEPS = ("post-copy", "keep both parts")
ASKS = ("post-copy", "wait for the operator")


def hosts(**how: Any) -> FakeHosts:
    writer = Writer(region=512 * MIB, rate=150 * MIB)
    return FakeHosts(machine=Machine(memory=1024 * MIB, setup=0.5, writers=[writer]), **how)


async def move(migrations: FakeHosts, **how: Any) -> Ending:
    return await run(migrations, UNDER, order=HYBRID, **how)


async def test_a_hybrid_switches_completes_and_leaves_no_definition_behind() -> None:
    events: list[Event] = []
    migrations = hosts(statistics=None)
    ending = await move(migrations, events=events)

    assert ending.outcome is Outcome.COMPLETED
    assert told(ending) == [("now", "switch to post-copy")]
    assert ending.switched == pytest.approx(10.7, abs=0.4)
    assert after_the_switch(migrations) == ["forget source"]
    assert phases(events) == [
        JobPhase.SETUP, JobPhase.PRE_COPY, JobPhase.POST_COPY, JobPhase.CLEANUP, JobPhase.DONE,
    ]  # fmt: skip
    assert ending.warnings == ()


async def test_a_guest_that_was_defined_nowhere_leaves_nothing_to_undefine() -> None:
    migrations = hosts()
    await run(migrations, UNDER, order=replace(HYBRID, persistent=False))

    assert "forget source" not in migrations.calls


@pytest.mark.parametrize("seconds", [1, 4, 10, 60, 560])
async def test_a_link_that_is_cut_is_left_to_tcp(seconds: float) -> None:
    events: list[Event] = []
    migrations = hosts(unplugged=[(12.0, 12.0 + seconds)])
    ending = await move(migrations, events=events)

    assert ending.outcome is Outcome.COMPLETED
    assert after_the_switch(migrations) == ["forget source"]
    assert told(ending)[1:] == ([KEEPS, GOES_ON] if seconds > 5 else [])
    assert (JobPhase.POST_COPY_PAUSED in phases(events)) is (seconds > 5)
    assert ending.elapsed < 12 + seconds + 10


async def test_a_stream_that_qemu_gave_up_is_resumed_again_and_again() -> None:
    migrations = hosts(resets=[12.0], unplugged=[(12.0, 60.0)])
    ending = await move(migrations)

    freed, resumed = migrations.when("free target"), migrations.when("resume")
    assert ending.outcome is Outcome.COMPLETED
    assert resumed[0] == pytest.approx(12.2, abs=0.4)
    assert all(a <= b for a, b in zip(freed, resumed, strict=True))
    # Each attempt hangs for 3 s; after it 1, 2, 4, 8, 16 s are waited.
    waits = [after - before for before, after in pairwise(resumed)]
    assert waits == pytest.approx([4, 5, 7, 11, 19], abs=0.7)
    assert told(ending)[1] == KEEPS
    assert told(ending)[-1] == GOES_ON
    assert told(ending).count(("post-copy", "resume post-copy")) == len(resumed)
    assert set(after_the_switch(migrations)) == {"free target", "resume", "forget source"}


async def test_so_is_one_that_tcp_gave_up() -> None:
    migrations = hosts(unplugged=[(12.0, 200.0)], tcp_patience=120.0)
    ending = await move(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert migrations.when("resume")[0] == pytest.approx(132, abs=1)


async def test_a_reset_without_a_dead_link_costs_a_moment() -> None:
    migrations = hosts(resets=[12.0])
    ending = await move(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert migrations.resumes == 1
    assert ending.elapsed < 18


@pytest.mark.parametrize("how", [{}, {"resets": [12.0]}, {"call_lost_at": 12.0}])
async def test_a_link_that_stays_dead_ends_the_asking_and_nothing_else(how: Any) -> None:
    migrations = hosts(unplugged=[(12.0, 712.0)], **how)
    ending = await move(migrations)

    assert ending.outcome is Outcome.POST_COPY_PAUSED
    assert ending.elapsed == pytest.approx(12 + 600, abs=35)
    assert not ENDS_A_PART & set(after_the_switch(migrations))
    assert told(ending)[-1] == ASKS
    assert told(ending).count(ASKS) == 1
    assert ending.error is not None
    assert migrations.resumes < 30


async def test_a_second_break_is_resumed_as_quickly_as_the_first() -> None:
    migrations = hosts(resets=[12.0, 59.0], unplugged=[(12.0, 57.0)])
    ending = await move(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert told(ending).count(GOES_ON) == 2
    assert min(at for at in migrations.when("resume") if at > 59) < 60


async def test_a_stream_that_goes_on_without_our_call_needs_no_resume() -> None:
    migrations = hosts(call_lost_at=12.0)
    ending = await move(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert ending.error is None
    assert after_the_switch(migrations) == ["forget source"]


async def test_a_target_that_cannot_be_freed_is_said_and_the_resume_tried() -> None:
    refuses = {"free target": [HypervisorError("beta: no ssh", host="beta")]}
    migrations = hosts(resets=[12.0], refuses=refuses)
    ending = await move(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert "beta: no ssh" in ending.warnings[0]


async def test_a_target_that_lost_the_guest_is_not_resumed_for_ten_minutes() -> None:
    migrations = hosts(target_dies_at=13.0, resets=[13.0])
    ending = await move(migrations)

    assert ending.outcome is Outcome.LOST
    assert ending.elapsed < 30
    assert not ENDS_A_PART & set(after_the_switch(migrations))


async def test_a_source_that_is_gone_is_asked_for_and_nothing_is_guessed() -> None:
    migrations = hosts(source_dies_at=13.0)
    ending = await move(migrations)

    assert ending.outcome is Outcome.UNKNOWN
    assert not ENDS_A_PART & set(after_the_switch(migrations))


async def test_the_operators_stop_does_nothing_in_post_copy_but_is_answered() -> None:
    migrations = hosts()
    ending = await move(migrations, stops=(12.0,))

    assert ending.outcome is Outcome.COMPLETED
    assert told(ending) == [("now", "switch to post-copy"), ("operator", "continue")]
    assert "post-copy cannot be cancelled" in ending.decisions[-1].reason
    assert "abort" not in migrations.calls


async def test_it_does_not_keep_a_break_that_comes_later_from_being_mended() -> None:
    migrations = hosts(unplugged=[(13.0, 30.0)])
    ending = await move(migrations, stops=(12.0,))

    assert ending.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("how", [{}, {"resets": [20.0]}])
async def test_in_a_broken_post_copy_it_ends_the_waiting(how: Any) -> None:
    stop = asyncio.Event()
    migrations = hosts(unplugged=[(12.0, 9999.0)], **how)
    ending = await move(migrations, stops=(12.5, 40.0, 41.0), stop=stop)

    assert ending.outcome is Outcome.POST_COPY_PAUSED
    assert ending.elapsed == pytest.approx(40, abs=1)
    assert ending.decisions[-1].reason == "the operator stopped waiting"
    assert not ENDS_A_PART & set(after_the_switch(migrations))
    assert stop.is_set()


async def test_a_call_that_ends_when_nobody_waits_for_it_any_more_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    migrations = hosts(unplugged=[(12.0, 9999.0)], tcp_patience=60.0)
    ending = await move(migrations, stops=(30.0,))
    await asyncio.sleep(60)
    gc.collect()

    assert ending.outcome is Outcome.POST_COPY_PAUSED
    assert "never retrieved" not in caplog.text


async def test_a_stop_that_was_refused_still_keeps_from_a_further_attempt() -> None:
    stop = asyncio.Event()
    migrations = hosts(target_dies_at=14.0)
    ending = await move(migrations, stops=(12.5,), stop=stop)

    assert ending.outcome is Outcome.LOST
    assert stop.is_set()


async def test_a_switch_whose_order_got_lost_is_given_again() -> None:
    refuses = {"post-copy": [OutcomeUnknown("alpha: no answer", host="alpha")]}
    migrations = hosts(refuses=refuses)
    ending = await move(migrations)

    assert ending.outcome is Outcome.COMPLETED
    assert migrations.calls.count("post-copy") == 2
    assert "abort" not in migrations.calls
    assert "no answer to the request" in ending.warnings[0]


async def test_a_switch_that_was_taken_and_forgotten_is_given_again() -> None:
    migrations = hosts(switch_takes=False)
    ending = await move(migrations, stops=(11.5,))

    assert ending.outcome is Outcome.COMPLETED
    assert migrations.calls.count("post-copy") == 2
    assert "abort" not in migrations.calls


async def test_somebody_elses_switch_is_post_copy_like_ours() -> None:
    migrations = hosts()
    never = terms("{when: {iteration: 99}, do: start_postcopy}", mode=Mode.HYBRID)
    asyncio.get_running_loop().call_later(5.0, migrations.machine.switch)
    ending = await run(migrations, never, order=HYBRID, stops=(6.0,))

    assert ending.outcome is Outcome.COMPLETED
    assert ending.switched == pytest.approx(5.1, abs=0.3)
    assert migrations.calls[-1] == "forget source"
    assert "abort" not in migrations.calls


async def test_mode_post_copy_switches_in_the_first_pass() -> None:
    migrations = hosts()
    ending = await run(migrations, terms(mode=Mode.POSTCOPY), order=HYBRID)

    assert ending.outcome is Outcome.COMPLETED
    assert told(ending) == [("mode", "switch to post-copy")]
    assert ending.decisions[0].numbers["iteration"] == 1


async def test_only_the_bandwidth_can_still_be_asked_for() -> None:
    step_log = FakeDesk([
        (12.0, RequestKind.BANDWIDTH, {"bytes_per_second": 200 * MIB}),
        (12.0, RequestKind.CANCEL, {}),
        (12.0, RequestKind.PAUSE, {}),
    ])  # fmt: skip
    migrations = hosts()
    await move(migrations, step_log=step_log)

    assert [(kind, ok) for kind, ok, _ in step_log.answers] == [
        ("bandwidth", True), ("cancel", False), ("pause", False),
    ]  # fmt: skip
    assert f"postcopy-bandwidth {200 * MIB}" in migrations.calls


async def test_a_post_copy_that_another_controller_left_broken_is_resumed() -> None:
    migrations = hosts(unplugged=[(12.0, 60.0)])
    migrations.began = asyncio.get_running_loop().time()
    await asyncio.sleep(11.0)
    migrations.now()
    migrations.machine.switch()
    await asyncio.sleep(3.0)
    migrations.broken = True
    engine = Migration(migrations, UNDER, lambda _event: None, asyncio.Event())
    ending = await engine.resume(HYBRID)

    assert ending.outcome is Outcome.COMPLETED
    assert migrations.calls[-1] == "forget source"
    assert migrations.resumes > 1
    assert not ENDS_A_PART & set(migrations.calls[:-1])


@pytest.mark.parametrize("more", ["", "on_postcopy_broken: ask\n"])
async def test_who_asks_for_a_resume_has_answered_a_policy_that_asks(more: str) -> None:
    policy = contract.answered(terms(RULE, mode=Mode.HYBRID, more=more).policy)
    migrations = hosts()
    migrations.began = asyncio.get_running_loop().time()
    await asyncio.sleep(11.0)
    migrations.now()
    migrations.machine.switch()
    await asyncio.sleep(3.0)
    migrations.broken = True
    engine = Migration(migrations, contract.resumed(policy), lambda _event: None, asyncio.Event())
    ending = await engine.resume(HYBRID)
    assert ending.outcome is Outcome.COMPLETED
    assert migrations.resumes == 1


async def test_the_pause_for_the_switch_is_part_of_the_result() -> None:
    ending = await move(hosts(statistics=None, paused_for=Seconds(0.2)))

    assert ending.outcome is Outcome.COMPLETED
    assert ending.switchover == pytest.approx(0.2)
