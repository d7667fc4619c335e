"""What is done about a guest whose host a fence agent decides about."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.host_deaths import (
    ANEW,
    CASE,
    DEAD,
    DIED,
    EMPTY,
    ENDED,
    ENDING,
    GONE,
    HANGS,
    HEARS,
    ODD,
    OVER,
    READY,
    REFUSES,
    WELL,
)
from vmckpt.errors import VmckptError
from vmckpt.protection import failover_policy, host_death
from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.failover_policy import FailoverAction
from vmckpt.protection.host_death import Case, Proof
from vmckpt.units import Seconds

PATIENCE = Seconds(5.0)
WANTS = {
    **WELL, "wants_leave": "17",
    "says": "output waits for permission to run unprotected: no answer in 2 s",
}  # fmt: skip
ALONE = {**WELL, "phase": "alone", "says": "no answer in 2 s"}
COPIES = {**WELL, "phase": "copying"}
AFTER = 9.0


def case(**changes: Any) -> Case:
    changes = {"theirs": HEARS, "watched": True, **changes}
    said: dict[str, Any] = {
        name: parse_answer(changes.pop(name)) for name in ("ours", "theirs") if name in changes
    }
    return replace(CASE, **said, **changes)


def silent(seconds: float) -> dict[str, Any]:
    return {**READY, "silent_s": seconds}


@pytest.mark.parametrize(
    ("seen", "do", "why"),
    [
        (case(ours=WELL), FailoverAction.WAIT, ""),
        (case(ours=WELL, theirs=READY), FailoverAction.WAIT, ""),
        (case(ours=WELL, theirs=GONE), FailoverAction.WAIT, ""),
        (case(ours=HANGS, theirs=READY), FailoverAction.WAIT, ""),
        (case(ours=REFUSES, theirs=READY), FailoverAction.WAIT, ""),
        # Cut off from the backup alone: it goes on, and nothing may be run in its place.
        (
            case(ours=WANTS, theirs=GONE),
            FailoverAction.GRANT_SOLO,
            "continues without beta: no answer in 2 s",
        ),
        (case(ours=WANTS, theirs=READY), FailoverAction.GRANT_SOLO, "continues without beta"),
        (
            case(ours={**WANTS, "says": None}, theirs=GONE),
            FailoverAction.GRANT_SOLO,
            "continues without beta: no reason reported",
        ),
        (
            case(ours=WANTS, theirs=GONE, alone=True),
            FailoverAction.GRANT_SOLO,
            "continues without beta",
        ),
        (case(ours=ALONE, theirs=READY, alone=True), FailoverAction.WAIT, "fail over manually"),
        (case(ours=COPIES, alone=True), FailoverAction.WAIT, "fail over manually"),
        (case(ours=WELL, theirs=READY, alone=True), FailoverAction.WAIT, "fail over manually"),
        (case(ours=WELL, alone=True), FailoverAction.STANDBY_RESTORED, "complete again"),
        (case(theirs=silent(AFTER), alone=True), FailoverAction.WAIT, "fail over manually"),
        (
            case(ours=ANEW, theirs=silent(AFTER), alone=True),
            FailoverAction.WAIT,
            "fail over manually",
        ),
        # Silent to all.
        (case(theirs=HEARS), FailoverAction.WAIT, ""),
        (case(theirs=silent(4.9)), FailoverAction.WAIT, "alpha does not answer"),
        (
            case(theirs=silent(5.1)),
            FailoverAction.FAIL_OVER,
            "alpha does not answer, and beta has received nothing",
        ),
        (
            case(theirs=EMPTY),
            FailoverAction.WAIT,
            "standby on beta is not ready: synchronising",
        ),
        (case(theirs=GONE), FailoverAction.WAIT, "standby on beta is not ready: beta: no answer"),
        # Its agent lives, and its QEMU is gone: there is nothing to run.
        (
            case(theirs=silent(AFTER) | {"runs": False}),
            FailoverAction.WAIT,
            "standby on beta is not ready",
        ),
        (case(ours=DIED, theirs=silent(1.0) | {"runs": False}), FailoverAction.WAIT, "not ready"),
        # Gone for sure.
        (
            case(ours=DIED, theirs=silent(0.6)),
            FailoverAction.FAIL_OVER,
            "no longer running on alpha",
        ),
        (
            case(ours=ANEW, theirs=silent(0.6)),
            FailoverAction.FAIL_OVER,
            "no longer running on alpha",
        ),
        (case(ours=DIED, theirs=EMPTY), FailoverAction.WAIT, "not ready"),
        (case(ours=ENDED, theirs=silent(AFTER)), FailoverAction.WAIT, ""),
        (case(ours=ENDING, theirs=silent(AFTER)), FailoverAction.WAIT, ""),
        (case(theirs=OVER), FailoverAction.FAIL_OVER, "it has failed over to beta"),
        (case(ours=DIED, theirs=OVER), FailoverAction.FAIL_OVER, "it has failed over to beta"),
        (
            case(ours=WELL, theirs=OVER),
            FailoverAction.WAIT,
            "it has failed over to beta, but is also running on alpha",
        ),
        (
            case(ours=WANTS, theirs=OVER),
            FailoverAction.WAIT,
            "it has failed over to beta, but is also running on alpha",
        ),
    ],
)
def test_each_case_is_decided_and_said(seen: Case, do: FailoverAction, why: str) -> None:
    told = failover_policy.decide(seen, patience=PATIENCE)
    assert told.do is do
    assert (why in told.why) if why else not told.why


def test_a_heartbeat_that_was_lost_is_no_dead_host_however_short_the_patience() -> None:
    for seconds, do in ((2.9, FailoverAction.WAIT), (3.1, FailoverAction.FAIL_OVER)):
        assert failover_policy.decide(case(theirs=silent(seconds)), patience=Seconds(0.5)).do is do


def test_whatever_is_failed_over_unasked_is_made_sure_of() -> None:
    """Its proof is one that needs no person, and no guest that had leave is forgotten."""
    seen = [
        case(ours=ours, theirs=theirs, alone=alone, has_fence=fence)
        for ours in (WELL, HANGS, ODD, ANEW, DIED, ENDING, ENDED, DEAD, WANTS, ALONE, COPIES)
        for theirs in (READY, HEARS, EMPTY, OVER, GONE, silent(0.1), silent(60.0))
        for alone in (False, True)
        for fence in (False, True)
    ]
    failed_over = 0
    for one in seen:
        if failover_policy.decide(one, patience=PATIENCE).do is not FailoverAction.FAIL_OVER:
            continue
        try:
            why = host_death.decide(one)
        except VmckptError:
            assert not one.has_fence  # somebody took it out of the inventory
            continue
        failed_over += 1
        assert why in (Proof.RUNS, Proof.GONE, Proof.FENCE)
        assert why is Proof.RUNS or not one.alone
    assert failed_over > 10


def test_nobody_has_leave_and_a_dead_host_at_once() -> None:
    """Who wants leave answers; who answers is not powered off."""
    for theirs in (READY, HEARS, EMPTY, GONE, silent(60.0)):
        told = failover_policy.decide(case(ours=WANTS, theirs=theirs), patience=PATIENCE)
        assert told.do is FailoverAction.GRANT_SOLO
