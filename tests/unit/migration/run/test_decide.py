"""What is decided in which order, and what is never decided."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.moving import on_its_way, rule, terms
from vmckpt.migration.run import actions
from vmckpt.migration.run import decide as run_decide
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    SetXbzrleCache,
    Stop,
    SwitchToPostcopy,
)
from vmckpt.migration.run.decide import AppliedActions, RunTerms, Verdict, decide, time_limit
from vmckpt.migration.run.progress import PassHistory
from vmckpt.model.migration import AutoConverge, JobPhase, Mode
from vmckpt.policy.model import (
    Compress,
    Do,
    GiveUp,
    MoveLimits,
    Pause,
    RaiseDowntime,
    RuleCondition,
    Stall,
    StartPostcopy,
    Throttle,
)
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

DONE = AppliedActions(max_downtime=Seconds(0.1))
STALLED = RuleCondition(stalled_for=Seconds(1.0))
THROTTLE = AutoConverge(initial=20, increment=10, at_most=60)
RAISE = RaiseDowntime(by=Seconds(0.05), to=Seconds(0.2))
FIVE = on_its_way(100, 50, 50, 50, 50, now=9.0)


def ask(
    under: RunTerms,
    track: PassHistory,
    done: AppliedActions = DONE,
    *,
    now: float = 9.0,
    stops: bool = False,
) -> tuple[Verdict | None, AppliedActions]:
    return decide(under, track, done, now=Seconds(now), operator_stops=stops)


def action(*asked: Any, **more: Any) -> Action | None:
    verdict, _ = ask(*asked, **more)
    return None if verdict is None else verdict.action


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        (RAISE, SetDowntime(Seconds(0.15))),
        (Throttle(THROTTLE), SetThrottle(THROTTLE)),
        (Compress(Bytes(64 * MIB)), SetXbzrleCache(Bytes(64 * MIB))),
        (StartPostcopy(), SwitchToPostcopy()),
        (Pause(), PauseGuest()),
        (GiveUp(), Abort(Stop.RULE)),
    ],
)
def test_each_kind_of_rule_has_its_action_once(do: Do, expected: Action) -> None:
    under = terms(rule(do))
    verdict, after = ask(under, FIVE)

    assert verdict is not None
    assert (verdict.action, verdict.rule, verdict.reason) == (
        expected,
        "it",
        "the rule has no conditions",
    )
    assert verdict.numbers["iteration"] == 5
    assert ask(under, FIVE, after)[0] is None
    assert actions.says(verdict.action)


def test_the_first_rule_that_holds_and_can_act_acts() -> None:
    under = terms(
        rule(Throttle(THROTTLE), RuleCondition(iteration=9), "later"),
        rule(Compress(Bytes(1)), name="first"),
        rule(GiveUp(), name="second"),
    )
    first, after = ask(under, FIVE)
    second, _ = ask(under, FIVE, after)

    assert [one.rule for one in (first, second) if one is not None] == ["first", "second"]


def test_a_switch_that_cannot_be_made_leaves_the_turn_to_the_next_rule() -> None:
    rules = (rule(StartPostcopy()), rule(GiveUp()))

    assert action(terms(*rules), FIVE) == SwitchToPostcopy()
    assert action(terms(*rules, post_copy=False), FIVE) == Abort(Stop.RULE)


# --- the downtime ---------------------------------------------------------------------------------


def test_the_downtime_is_raised_once_in_a_pass_up_to_its_bound() -> None:
    under, done, limits = terms(rule(RAISE)), DONE, []
    for iteration in (1, 1, 2, 2, 3, 4, 5):
        verdict, done = ask(under, on_its_way(*[50] * iteration, now=9.0), done)
        limits.append(None if verdict is None else verdict.action)

    assert limits == [
        SetDowntime(Seconds(0.15)), None, SetDowntime(Seconds(0.2)), None, None, None, None,
    ]  # fmt: skip


def test_steps_add_up_to_the_bound_and_no_splinter_is_left() -> None:
    step = RaiseDowntime(by=Seconds(0.05), to=Seconds(0.5))
    under, done, count = terms(rule(step)), AppliedActions(max_downtime=Seconds(0.15)), 0
    for iteration in range(1, 12):
        verdict, done = ask(under, on_its_way(*[50] * iteration, now=9.0), done)
        count += verdict is not None

    assert (count, done.max_downtime) == (7, 0.5)


def test_before_the_first_pass_nothing_is_raised() -> None:
    assert action(terms(rule(RAISE)), on_its_way(now=1.0)) is None


def test_a_limit_that_the_operator_set_higher_is_left() -> None:
    assert action(terms(rule(RAISE)), FIVE, run_decide.after(DONE, SetDowntime(Seconds(9)))) is None


# --- what comes first -----------------------------------------------------------------------------


def test_the_operator_comes_before_the_time_limit_and_that_before_the_rules() -> None:
    under = terms(rule(StartPostcopy()), limit=5.0)

    assert action(under, FIVE, stops=True) == Abort(Stop.OPERATOR)
    assert action(under, FIVE) == Abort(Stop.TIME_LIMIT)
    assert action(under, FIVE, now=4.9) == SwitchToPostcopy()


@pytest.mark.parametrize(
    ("limit", "now", "stops", "expected"),
    [
        pytest.param(None, 1e6, False, None, id="no limit"),
        pytest.param(5.0, 4.9, False, None, id="within the limit"),
        pytest.param(5.0, 5.0, False, Abort(Stop.TIME_LIMIT), id="limit reached"),
        pytest.param(None, 1.0, True, Abort(Stop.OPERATOR), id="operator"),
    ],
)
def test_also_before_any_sample(
    limit: float | None, now: float, stops: bool, expected: Action | None
) -> None:
    under = terms(rule(GiveUp()), limit=limit)

    assert action(under, PassHistory(began=Seconds(0.0)), now=now, stops=stops) == expected


switched = st.sampled_from(
    [
        (FIVE, replace(DONE, switched=True)),
        (on_its_way(100, 50, now=9.0, phase=JobPhase.POST_COPY), DONE),
    ]
)


@given(switched, st.floats(0, 1e6), st.booleans())
def test_after_the_switch_nothing_is_ever_decided(
    where: tuple[PassHistory, AppliedActions], now: float, stops: bool
) -> None:
    rules = [rule(do) for do in (StartPostcopy(), GiveUp(), Pause(), RAISE, Throttle(THROTTLE))]
    under = terms(*rules, limit=1.0, mode=Mode.POSTCOPY)

    assert ask(under, *where, now=now, stops=stops) == (None, where[1])


def test_a_guest_that_was_paused_is_brought_to_the_end_unless_the_operator_stops_it() -> None:
    under = terms(rule(Pause()), rule(GiveUp()), limit=5.0)
    paused = run_decide.after(DONE, PauseGuest())

    assert action(under, FIVE, paused, now=15.0) is None
    assert action(under, FIVE, paused, stops=True) == Abort(Stop.OPERATOR)


def test_in_the_switchover_only_giving_up_is_left() -> None:
    standing = on_its_way(100, 50, now=9.0, phase=JobPhase.SWITCHOVER)
    rules = [rule(do) for do in (StartPostcopy(), Pause(), RAISE, Throttle(THROTTLE))]

    assert action(terms(*rules), standing) is None
    assert action(terms(*rules, rule(GiveUp())), standing) == Abort(Stop.RULE)
    assert action(terms(limit=5.0), standing) == Abort(Stop.TIME_LIMIT)


def test_mode_post_copy_switches_as_soon_as_memory_is_sent() -> None:
    under = terms(mode=Mode.POSTCOPY)
    verdict, after = ask(under, on_its_way(100, now=9.0))

    assert action(under, on_its_way(now=9.0)) is None
    assert verdict is not None
    assert (verdict.action, verdict.rule, after.switched) == (SwitchToPostcopy(), "mode", True)


# --- silence and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("do", [StartPostcopy(), Pause()])
@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.POSTCOPY])
def test_nothing_switches_or_pauses_over_a_silent_link(do: Do, mode: Mode) -> None:
    silent = on_its_way(100, 50, now=9.0, silent=2.1)

    assert action(terms(rule(do), mode=mode), silent) is None


def test_nor_over_one_that_carried_nothing_since_the_sample_before() -> None:
    """A link that died a moment ago: the bytes of the sample before are the last ones."""
    died = replace(FIVE, moved_at=Seconds(8.8))

    assert action(terms(rule(StartPostcopy())), died) is None
    assert action(terms(mode=Mode.POSTCOPY), died) is None


def test_a_silent_link_keeps_nobody_from_giving_up() -> None:
    silent = on_its_way(100, 50, now=9.0, silent=5.0)

    assert action(terms(rule(StartPostcopy()), rule(GiveUp())), silent) == Abort(Stop.RULE)


@pytest.mark.parametrize("do", [StartPostcopy(), Pause(), RAISE, Throttle(THROTTLE)])
def test_what_was_refused_is_asked_for_again_after_a_moment(do: Do) -> None:
    under = terms(rule(do), rule(Compress(Bytes(1)), name="next"))
    refused = run_decide.refused(DONE, "it", Seconds(9.0))
    verdict, _ = ask(under, on_its_way(100, 50, now=9.1), refused, now=9.1)

    assert verdict is not None
    assert verdict.rule == "next"
    assert (
        ask(under, on_its_way(100, 50, now=11.1), refused, now=11.1)[0]
        == ask(under, on_its_way(100, 50, now=11.1), now=11.1)[0]
    )


def test_only_the_last_refusal_counts() -> None:
    twice = run_decide.refused(run_decide.refused(DONE, "it", Seconds(1.0)), "it", Seconds(9.0))

    assert twice.refused == (("it", 9.0),)


# --- waiting for a good moment --------------------------------------------------------------------

BUSY = on_its_way(100, 20, 60, 70, now=30.0)
CALM = on_its_way(100, 20, 60, 70, 20, now=34.0)


@pytest.mark.parametrize(
    ("do", "expected"), [(StartPostcopy(), SwitchToPostcopy()), (Pause(), PauseGuest())]
)
def test_a_stall_waits_for_a_pass_with_little_left(do: Do, expected: Action) -> None:
    under = terms(rule(do, STALLED), rule(GiveUp(), name="next"))
    verdict, waiting = ask(under, BUSY, now=30.0)

    assert verdict is None
    assert (waiting.waits, waiting.waits_since) == ("it", 30.0)
    assert ask(under, BUSY, waiting, now=31.0) == (None, waiting)
    assert action(under, CALM, waiting, now=34.0) == expected


def test_but_not_for_ever() -> None:
    under = terms(rule(StartPostcopy(), STALLED), patience=10.0)
    _, waiting = ask(under, BUSY, now=30.0)

    assert action(under, replace(BUSY, moved_at=Seconds(39.9), last=_at(39.9)), waiting,
                  now=39.9) is None  # fmt: skip
    assert action(under, replace(BUSY, moved_at=Seconds(40.0), last=_at(40.0)), waiting,
                  now=40.0) == SwitchToPostcopy()  # fmt: skip


def _at(now: float) -> Any:
    assert BUSY.last is not None
    return replace(BUSY.last, at=Seconds(now))


def test_a_stall_that_ends_ends_the_waiting() -> None:
    under = terms(rule(StartPostcopy(), STALLED))
    _, waiting = ask(under, BUSY, now=30.0)
    better = on_its_way(100, 20, 60, 70, 5, now=31.0)

    assert ask(under, better, waiting, now=31.0)[1].waits is None


def test_other_reasons_to_switch_do_not_wait() -> None:
    assert (
        action(terms(rule(StartPostcopy(), RuleCondition(iteration=2))), BUSY, now=30.0)
        == SwitchToPostcopy()
    )


# --- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "per_gib", "gib", "expected"),
    [
        (None, None, 4.0, None),
        (60.0, None, 4.0, 60.0),
        (None, 150.0, 4.0, 600.0),
        (None, 150.0, 0.25, 150.0),
        (60.0, 150.0, 4.0, 60.0),
        (3600.0, 150.0, 4.0, 600.0),
    ],
)
def test_the_shorter_limit_counts_and_no_guest_is_smaller_than_a_gib(
    total: float | None, per_gib: float | None, gib: float, expected: float | None
) -> None:
    limits = MoveLimits(
        max_downtime=Seconds(0.1), time=None if total is None else Seconds(total),
        time_per_gib=None if per_gib is None else Seconds(per_gib),
    )  # fmt: skip
    policy = replace(terms().policy, limits=limits)

    assert time_limit(policy, Bytes(int(gib * 1024 * MIB))) == expected


def test_what_the_operator_did_is_done() -> None:
    assert run_decide.after(DONE, SetDowntime(Seconds(1.0))).max_downtime == 1.0
    assert run_decide.after(DONE, SwitchToPostcopy()).switched
    assert run_decide.after(DONE, PauseGuest()).paused
    for other in (
        SetThrottle(THROTTLE),
        SetXbzrleCache(Bytes(1)),
        LimitBandwidth(None),
        Abort(Stop.OPERATOR),
    ):
        assert run_decide.after(DONE, other) == DONE


def test_what_is_done_is_said_in_a_few_words() -> None:
    assert actions.says(LimitBandwidth(BytesPerSecond(MIB))) == "limit to 1.0 MiB/s"
    assert actions.says(LimitBandwidth(None)) == "lift the limit"
    assert actions.says(SetThrottle(THROTTLE)) == "slow the guest down by 20 % to 60 %"


def test_the_margin_is_the_policys() -> None:
    policy = replace(terms(rule(GiveUp(), STALLED)).policy, stall=Stall(margin=0.5))
    under = replace(terms(), policy=policy)
    slowly = on_its_way(100, 80, 70, 60, now=30.0)

    assert action(under, slowly, now=30.0) == Abort(Stop.RULE)
    assert action(terms(rule(GiveUp(), STALLED)), slowly, now=30.0) is None


def test_a_guest_that_stands_still_for_a_dead_link_goes_on_where_it_was() -> None:
    paused = run_decide.after(DONE, PauseGuest())

    assert action(terms(), FIVE, paused, now=18.0) is None
    assert action(terms(), FIVE, paused, now=20.0) == Abort(Stop.RULE)
