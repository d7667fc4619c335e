"""What makes sure that a host is dead before its guest's standby may run."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.host_deaths import (
    ANEW,
    CASE,
    DEAD,
    DIED,
    DIED_ALONE,
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
    SWITCHED,
    WELL,
)
from vmckpt.errors import BadInput, GuestLocked, VmckptError
from vmckpt.protection import host_death
from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.host_death import Case, Proof


def case(**changes: Any) -> Case:
    said: dict[str, Any] = {
        name: parse_answer(changes.pop(name)) for name in ("ours", "theirs") if name in changes
    }
    return replace(CASE, **said, **changes)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (case(), Proof.FENCE),
        (case(theirs={**READY, "connected": True}), Proof.FENCE),
        (case(word=True), Proof.WORD),
        (case(has_fence=False, word=True), Proof.WORD),
        (case(ours=REFUSES, word=True), Proof.WORD),
        (case(has_lease=True), Proof.LEASE),
        (case(has_lease=True, ours=REFUSES), Proof.LEASE),
        (case(has_lease=True, word=True), Proof.LEASE),
        (case(has_lease=True, fence=True), Proof.FENCE),
        (case(ours=HANGS, theirs=HEARS, fence=True), Proof.FENCE),
        (case(ours=WELL, theirs=HEARS, fence=True), Proof.FENCE),
        (case(ours=REFUSES, fence=True), Proof.FENCE),
        (case(ours=ANEW, fence=True), Proof.FENCE),
        (case(ours=ANEW, watched=True), Proof.GONE),
        (case(ours=DIED), Proof.GONE),
        (case(ours=SWITCHED), Proof.GONE),
        (case(ours=DIED, has_fence=False), Proof.GONE),
        (case(ours=DIED_ALONE, watched=True), Proof.GONE),
        (case(ours=DIED_ALONE, word=True), Proof.WORD),
        (case(ours=DIED, word=True), Proof.WORD),
        (case(ours=DIED, has_lease=True), Proof.LEASE),
        (case(alone=True, word=True), Proof.WORD),
        (case(theirs=OVER), Proof.RUNS),
        (case(theirs=OVER, fence=True), Proof.RUNS),
        (case(theirs=OVER, has_fence=False), Proof.RUNS),
    ],
)
def test_what_makes_sure_of_it(seen: Case, why: Proof) -> None:
    assert host_death.decide(seen) is why


@pytest.mark.parametrize(
    ("seen", "kind", "told"),
    [
        (
            case(ours=WELL, theirs=HEARS),
            GuestLocked,
            "web1 is running on alpha, which answers; .*--planned",
        ),
        (case(ours=WELL), GuestLocked, "--fence powers it off first"),
        (case(ours=WELL, word=True), GuestLocked, "--planned"),
        (case(ours=HANGS, theirs=HEARS), GuestLocked, "which answers"),
        (case(has_fence=False), BadInput, "know that alpha is off; .* --host-is-off"),
        (case(has_fence=False, fence=True), BadInput, "no fence agent in the inventory"),
        (case(ours=REFUSES), BadInput, "not silent .*login was refused.*fenced only on request"),
        (case(ours=ODD), BadInput, "is not silent .its agent answers.*add --fence"),
        (case(ours=ENDED), BadInput, "is not silent .its agent answers.*add --fence"),
        (case(ours=ENDING, watched=True), BadInput, "is not silent"),
        (case(ours=ANEW), BadInput, "is not silent .its agent answers.*add --fence"),
        (case(ours=DIED_ALONE), BadInput, "is not silent .its agent answers.*add --fence"),
        (
            case(ours=DIED, theirs=EMPTY),
            GuestLocked,
            "web1 is no longer running on alpha: the standby on beta is not",
        ),
        (case(alone=True), GuestLocked, "had permission to run unprotected there.*--host-is-off"),
        (case(alone=True, fence=True), GuestLocked, "had permission to run unprotected there"),
        (
            case(ours=ANEW, watched=True, alone=True),
            GuestLocked,
            "is not running on any host, and its standby on beta may be outdated: the guest had"
            " permission to run unprotected.*--host-is-off",
        ),
        (case(theirs=HEARS), BadInput, "is not silent .beta still receives heartbeats from it"),
        (
            case(theirs=EMPTY),
            GuestLocked,
            "is not fenced: the standby on beta is not ready: synchronising",
        ),
        (case(theirs=GONE), GuestLocked, "not fenced: the standby on beta is not ready: beta: no"),
        (case(theirs=EMPTY, fence=True), GuestLocked, "not ready"),
        (case(ours={**WELL, "phase": "alone"}, fence=True), GuestLocked, "is outdated .alone"),
        (case(ours={**WELL, "phase": "copying"}, fence=True), GuestLocked, "is outdated"),
    ],
)
def test_else_it_is_refused(seen: Case, kind: type[VmckptError], told: str) -> None:
    with pytest.raises(kind, match=told) as caught:
        host_death.decide(seen)
    assert "\n" not in str(caught.value)


def test_nobody_is_powered_off_unasked_unless_all_are_silent_and_the_standby_is_ready() -> None:
    for ours in (WELL, HANGS, ODD, ANEW, DIED, ENDING, ENDED, DEAD, REFUSES):
        for theirs in (READY, HEARS, EMPTY, OVER, GONE):
            for lease in (False, True):
                for word in (False, True):
                    seen = case(ours=ours, theirs=theirs, has_lease=lease, word=word)
                    try:
                        fenced = host_death.decide(seen) is Proof.FENCE
                    except VmckptError:
                        fenced = False
                    only = ours is DEAD and theirs is READY and not lease and not word
                    assert fenced == only


def test_a_person_who_says_that_a_host_is_off_which_is_heard_is_not_believed() -> None:
    told = "alpha is not off: beta still receives heartbeats of web1"
    with pytest.raises(GuestLocked, match=told):
        host_death.decide(case(ours=REFUSES, theirs=HEARS, word=True))


@pytest.mark.parametrize("changes", [{}, {"fence": True}, {"ours": DIED}])
def test_nobody_is_powered_off_for_a_standby_whose_qemu_is_gone(changes: dict[str, Any]) -> None:
    with pytest.raises(GuestLocked, match="is not ready"):
        host_death.decide(case(theirs={**READY, "runs": False}, **changes))
