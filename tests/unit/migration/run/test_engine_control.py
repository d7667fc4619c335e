"""What the engine does about rules, the operator and refusals while memory moves."""

import asyncio
import dataclasses
from typing import Any

import pytest

from tests.support.engine_runs import HYBRID, ORDER, phases, run, terms, told
from tests.support.fake_drivers import FakeDesk, FakeHosts, refusal
from tests.support.simulated import Machine, Writer
from vmckpt.errors import OutcomeUnknown
from vmckpt.journal.records import RequestKind
from vmckpt.migration.request import IDLE_THROTTLE
from vmckpt.migration.run import progress
from vmckpt.migration.run.decide import RunTerms
from vmckpt.migration.run.engine import Ending
from vmckpt.model.events import Event, Sampled
from vmckpt.model.migration import JobPhase, Mode, Outcome
from vmckpt.units import MIB, Seconds

# A run that does not end is an error, not a test that hangs.
pytestmark = pytest.mark.looptime(end=3000)

NOW = "{name: now, when: {iteration: 2}, do: start_postcopy}"
THROTTLE = "{auto_converge: {initial: 20, increment: 30, at_most: 90}}"
SLOWER = "{name: slower, when: {iteration: 3}, do: " + THROTTLE + "}"
LONGER = "{name: longer, when: {iteration: 3}, do: {raise_downtime: {by: 100ms, to: 300ms}}}"
THROTTLED = dataclasses.replace(ORDER, auto_converge=IDLE_THROTTLE)


def hosts(rate: float = 150 * MIB, **how: Any) -> FakeHosts:
    """Never ends by pre-copy: 10 s for the first pass, then 256 MiB dirty again in each."""
    writer = Writer(region=256 * MIB, rate=rate)
    return FakeHosts(machine=Machine(memory=1024 * MIB, setup=0.5, writers=[writer]), **how)


def hybrid(*rules: str) -> RunTerms:
    """It may switch, but no rule asks for it before pass 99."""
    late = "{when: {iteration: 99}, do: start_postcopy}"
    return terms(", ".join((*rules, late)), mode=Mode.HYBRID)


async def test_rules_act_in_their_order_until_it_arrives() -> None:
    migrations = hosts(200 * MIB)
    ending = await run(migrations, terms(f"{LONGER}, {SLOWER}"), order=THROTTLED)

    assert ending.outcome is Outcome.COMPLETED
    assert told(ending)[:3] == [
        ("longer", "allow 200 ms of downtime"),
        ("slower", "slow the guest down by 20 % to 90 %"),
        ("longer", "allow 300 ms of downtime"),
    ]
    assert migrations.calls[:3] == ["downtime 0.1", "throttle 1", "move peer-to-peer"]
    assert all(one.acted and one.numbers["iteration"] for one in ending.decisions)


async def test_a_guest_that_was_paused_is_not_given_up_at_the_time_limit() -> None:
    events: list[Event] = []
    migrations = hosts()
    rules = "{name: stop it, when: {time_used: 13s}, do: pause}"
    ending = await run(migrations, terms(rules), timeout=14.0, events=events)

    assert ending.outcome is Outcome.COMPLETED
    assert ending.elapsed > 14
    assert told(ending) == [("stop it", "pause the guest")]
    assert JobPhase.PAUSED in phases(events)


async def test_the_operator_may_still_stop_it() -> None:
    migrations = hosts()
    ending = await run(migrations, terms("{when: {time_used: 13s}, do: pause}"), stops=(13.5,))

    assert ending.outcome is Outcome.CANCELLED


async def test_what_was_set_is_set_back_on_a_guest_that_stays() -> None:
    step_log = FakeDesk([(3.0, RequestKind.BANDWIDTH, {"bytes_per_second": 50 * MIB})])
    migrations = hosts(400 * MIB)
    ending = await run(migrations, terms(SLOWER), order=THROTTLED, stops=(30.0,), step_log=step_log)

    assert ending.outcome is Outcome.CANCELLED
    assert migrations.calls[-3:] == ["throttle usual", "bandwidth None", "downtime 0.3"]


async def test_one_thing_that_cannot_be_set_back_does_not_keep_the_others() -> None:
    migrations = hosts(400 * MIB)
    migrations.refuses["throttle"] = []

    async def refusing() -> None:
        await asyncio.sleep(20)
        migrations.refuses["throttle"] = [refusal("busy")]

    later = asyncio.create_task(refusing())
    ending = await run(migrations, terms(), order=THROTTLED, stops=(30.0,))
    await later

    assert migrations.calls[-1] == "downtime 0.3"
    assert ending.warnings == (
        "the CPU throttle of the guest's QEMU may not have been restored: alpha: busy",
    )


async def test_nothing_is_set_back_on_a_guest_that_arrived() -> None:
    migrations = hosts(0)
    await run(migrations, order=THROTTLED)

    assert migrations.calls[2:] == ["move peer-to-peer", "forget source"]


async def test_giving_up_by_a_rule_is_no_failure() -> None:
    migrations = hosts()
    ending = await run(migrations, terms("{name: no use, when: {iteration: 4}, do: abort}"))

    assert ending.outcome is Outcome.NOT_CONVERGED
    assert told(ending) == [("no use", "abort")]


async def test_what_was_refused_is_said_and_tried_again_after_a_moment() -> None:
    migrations = hosts(refuses={"post-copy": [refusal("not now"), refusal("not now")]})
    ending = await run(migrations, hybrid(NOW), order=HYBRID)

    tries = migrations.when("post-copy")
    assert ending.outcome is Outcome.COMPLETED
    assert len(tries) == 3
    assert tries[1] - tries[0] == pytest.approx(2.1, abs=0.2)
    assert ending.warnings == ("could not switch to post-copy: alpha: not now",)
    assert told(ending) == [("now", "switch to post-copy")]


async def test_what_is_refused_for_ever_does_not_keep_the_next_rule_from_acting() -> None:
    migrations = hosts(refuses={"post-copy": [refusal("never")] * 99})
    last = "{name: last, when: {iteration: 4}, do: abort}"
    ending = await run(migrations, terms(f"{NOW}, {last}", mode=Mode.HYBRID), order=HYBRID)

    assert ending.outcome is Outcome.NOT_CONVERGED
    assert told(ending) == [("last", "abort")]


async def test_a_pause_without_an_answer_is_asked_for_again() -> None:
    """Else a guest that runs on would have neither rules nor a time limit any more."""
    lost = OutcomeUnknown("alpha: no answer", host="alpha")
    migrations = hosts(refuses={"halt": [lost]})
    rule = "{name: stop it, when: {iteration: 2}, do: pause}"
    ending = await run(migrations, terms(rule), stops=(30.0,))

    assert migrations.calls.count("halt") == 2
    assert ending.warnings == ("no answer to the request to pause the guest: alpha: no answer",)


async def test_observing_decides_and_does_nothing() -> None:
    migrations = hosts()
    ending = await run(migrations, hybrid(LONGER), stops=(40.0,), observe=True)

    assert ending.outcome is Outcome.CANCELLED
    assert [one.acted for one in ending.decisions] == [False, False, True]
    assert told(ending)[-1] == ("operator", "abort")
    assert migrations.calls == ["downtime 0.1", "move peer-to-peer", "abort", "downtime 0.3"]


async def test_an_observer_who_would_have_switched_can_still_be_stopped() -> None:
    migrations = hosts()
    ending = await run(migrations, hybrid(NOW), order=HYBRID, stops=(20.0,), observe=True)

    assert ending.outcome is Outcome.CANCELLED
    assert [(one.action, one.acted) for one in ending.decisions] == [
        ("switch to post-copy", False), ("abort", True),
    ]  # fmt: skip


async def test_an_observer_says_once_that_it_would_have_given_up() -> None:
    migrations = hosts()
    ending = await run(migrations, terms(LONGER), timeout=9.0, stops=(20.0,), observe=True)

    assert [(one.rule, one.acted) for one in ending.decisions] == [
        ("time limit", False), ("operator", True),
    ]  # fmt: skip
    assert ending.outcome is Outcome.CANCELLED


def ask(kind: RequestKind | str, **arguments: Any) -> tuple[float, RequestKind | str, Any]:
    return (12.0, kind, arguments)


async def asked(
    *requests: Any, stops: tuple[float, ...] = (20.0,), **how: Any
) -> tuple[FakeHosts, FakeDesk, Ending]:
    migrations, step_log = hosts(**how), FakeDesk(list(requests))
    ending = await run(migrations, hybrid(), order=HYBRID, step_log=step_log, stops=stops)
    return migrations, step_log, ending


async def test_bandwidth_and_downtime_can_be_asked_for() -> None:
    migrations, step_log, ending = await asked(
        ask(RequestKind.BANDWIDTH, bytes_per_second=40 * MIB),
        ask(RequestKind.MAX_DOWNTIME, seconds=0.25),
    )

    assert step_log.answers == [
        ("bandwidth", True, "limit to 40 MiB/s"),
        ("max-downtime", True, "allow 250 ms of downtime"),
    ]
    assert {f"bandwidth {40 * MIB}", "downtime 0.25"} <= set(migrations.calls)
    assert [one.rule for one in ending.decisions] == ["operator"] * 3
    assert ending.decisions[0].reason == "requested by anna@desk"


async def test_post_copy_can_be_asked_for() -> None:
    migrations, step_log, ending = await asked(ask(RequestKind.POSTCOPY))

    assert step_log.answers == [("postcopy", True, "switch to post-copy")]
    assert ending.outcome is Outcome.COMPLETED
    assert "abort" not in migrations.calls


async def test_a_pause_can_be_asked_for() -> None:
    migrations, step_log, ending = await asked(
        ask(RequestKind.PAUSE), (12.3, RequestKind.PAUSE, {}), stops=()
    )

    assert [answer[1:] for answer in step_log.answers] == [
        (True, "pause the guest"), (False, "the guest is already paused"),
    ]  # fmt: skip
    assert ending.outcome is Outcome.COMPLETED
    assert migrations.calls.count("halt") == 1


async def test_it_can_be_cancelled_and_then_does_nothing_else() -> None:
    migrations, step_log, ending = await asked(ask(RequestKind.CANCEL), ask(RequestKind.POSTCOPY))

    assert step_log.answers == [
        ("cancel", True, "cancelling"), ("postcopy", False, "the migration is being stopped"),
    ]  # fmt: skip
    assert ending.outcome is Outcome.CANCELLED
    assert "post-copy" not in migrations.calls


async def test_a_refused_request_is_answered_with_libvirts_words() -> None:
    _, step_log, ending = await asked(
        ask(RequestKind.PAUSE), refuses={"halt": [refusal("guest is busy")]}
    )

    assert step_log.answers == [("pause", False, "could not pause the guest: alpha: guest is busy")]
    assert step_log.answers[0][2] in ending.warnings


async def test_a_request_that_makes_no_sense_ends_nothing() -> None:
    _, step_log, ending = await asked(ask("dance"), ask(RequestKind.MAX_DOWNTIME))

    assert [(kind, ok) for kind, ok, _ in step_log.answers] == [
        ("dance", False), ("max-downtime", False),
    ]  # fmt: skip
    assert ending.outcome is Outcome.CANCELLED


async def test_estimates_from_where_passes_began_are_those_from_all_samples() -> None:
    """To go through all samples at each one would take longer and longer."""
    events: list[Event] = []
    migrations = hosts(60 * MIB)
    ending = await run(migrations, events=events)
    told_ = [event.estimate for event in events if isinstance(event, Sampled)]

    assert ending.outcome is Outcome.COMPLETED
    assert told_ == [
        progress.estimate(ending.samples[: number + 1], Seconds(0.1))
        for number in range(len(ending.samples))
    ]
