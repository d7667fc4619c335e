from dataclasses import replace
from typing import Any

import pytest

from tests.support.moving import terms
from vmckpt.journal.records import Request, RequestKind
from vmckpt.migration.run import operator_requests
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    Stop,
    SwitchToPostcopy,
)
from vmckpt.migration.run.decide import AppliedActions, RunTerms
from vmckpt.model.migration import Mode
from vmckpt.units import MIB, BytesPerSecond, Seconds

DONE = AppliedActions(max_downtime=Seconds(0.1))
SWITCHED, PAUSED = replace(DONE, switched=True), replace(DONE, paused=True)
HYBRID, PRECOPY = terms(), terms(mode=Mode.PRECOPY, post_copy=False)


def ask(
    kind: str, under: RunTerms = HYBRID, done: AppliedActions = DONE, *, moves: bool = True,
    stopping: bool = False, **arguments: Any,
) -> Action | str:  # fmt: skip
    request = Request(
        id=1, operation="m1", kind=kind, arguments=arguments, asked_by="anna@desk", asked_at=0.0,
        taken_at=0.0, answered_at=None, ok=None, answer=None,
    )  # fmt: skip
    return operator_requests.resolve_request(request, under, done, moves=moves, stopping=stopping)


@pytest.mark.parametrize(
    ("kind", "arguments", "action"),
    [
        (
            RequestKind.BANDWIDTH,
            {"bytes_per_second": 5 * MIB},
            LimitBandwidth(BytesPerSecond(5 * MIB)),
        ),
        (RequestKind.BANDWIDTH, {"bytes_per_second": None}, LimitBandwidth(None)),
        (RequestKind.MAX_DOWNTIME, {"seconds": 0.5}, SetDowntime(Seconds(0.5))),
        (RequestKind.POSTCOPY, {}, SwitchToPostcopy()),
        (RequestKind.PAUSE, {}, PauseGuest()),
        (RequestKind.CANCEL, {}, Abort(Stop.OPERATOR)),
    ],
)
def test_each_request_has_its_action(
    kind: RequestKind, arguments: dict[str, Any], action: Action
) -> None:
    assert ask(kind, **arguments) == action


REFUSED = [
    ("dance", {}, {}, "'dance' {} is not a valid request"),
    (RequestKind.BANDWIDTH, {}, {}, "not a valid request"),
    (RequestKind.BANDWIDTH, {}, {"bytes_per_second": 0}, "not a valid request"),
    (RequestKind.BANDWIDTH, {}, {"bytes_per_second": "much"}, "not a valid request"),
    (RequestKind.MAX_DOWNTIME, {}, {"seconds": None}, "not a valid request"),
    (RequestKind.MAX_DOWNTIME, {}, {"seconds": -1}, "not a valid request"),
    (RequestKind.MAX_DOWNTIME, {}, {"seconds": float("nan")}, "not a valid request"),
    (RequestKind.MAX_DOWNTIME, {}, {"seconds": float("inf")}, "not a valid request"),
    (RequestKind.POSTCOPY, {"under": PRECOPY}, {}, "was started in mode precopy"),
    (RequestKind.POSTCOPY, {"moves": False}, {}, "no memory is being sent now"),
    (RequestKind.POSTCOPY, {"stopping": True}, {}, "the migration is being stopped"),
    (RequestKind.PAUSE, {"moves": False}, {}, "no memory is being sent now"),
    (RequestKind.PAUSE, {"done": PAUSED}, {}, "is already paused"),
    (RequestKind.PAUSE, {"stopping": True}, {}, "the migration is being stopped"),
    (RequestKind.CANCEL, {"done": SWITCHED}, {}, "it cannot be cancelled"),
    (RequestKind.PAUSE, {"done": SWITCHED}, {}, "it cannot be cancelled"),
    (RequestKind.POSTCOPY, {"done": SWITCHED}, {}, "it cannot be cancelled"),
    (RequestKind.MAX_DOWNTIME, {"done": SWITCHED}, {"seconds": 1}, "it cannot be cancelled"),
]


@pytest.mark.parametrize(("kind", "where", "arguments", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_words(
    kind: str, where: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    answer = ask(kind, **where, **arguments)

    assert isinstance(answer, str)
    assert words.replace("'", "") in answer


def test_in_post_copy_there_is_the_bandwidth_to_choose() -> None:
    assert ask(RequestKind.BANDWIDTH, done=SWITCHED, bytes_per_second=None) == LimitBandwidth(None)


def test_who_cancels_twice_is_told_so_twice() -> None:
    assert ask(RequestKind.CANCEL, stopping=True) == Abort(Stop.OPERATOR)
