"""What is written to the journal: batches, ways, ends, and the JSON that is printed."""

from dataclasses import replace

import pytest

from vmckpt.journal.records import (
    Batch,
    Changes,
    ControllerIdentity,
    Operation,
    Record,
    Request,
    StepState,
    StoredEvent,
    StoredSample,
    StoredStep,
    became_of_steps,
    utc,
)
from vmckpt.model.migration import Outcome
from vmckpt.units import Seconds

HERE = ControllerIdentity(host="desk", boot="b-1", pid=7, started=9)
MOVE = Operation(
    id="m-1", kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta",
    policy=None, mode="precopy", state="running", phase="pre-copy", outcome=None,
    asked_by="eve@desk", asked_from=None, controller=HERE, began_at=0.25, ended_at=None,
    detail={"wishes": {}}, report=None,
)  # fmt: skip
FIRST, SECOND = (Record(kind="noted", at=Seconds(at), values={}) for at in (1.0, 2.0))


@pytest.mark.parametrize(
    ("operation", "way"),
    [
        (MOVE, "alpha → beta"),
        (replace(MOVE, source=None, target=None), "? → ?"),
        (replace(MOVE, kind="snapshot", target=None), "snapshot on alpha"),
        (replace(MOVE, kind="restore", target="beta"), "alpha → beta"),
    ],
)
def test_an_operation_is_called_by_its_way_or_its_kind_and_place(
    operation: Operation, way: str
) -> None:
    assert operation.way == way


def test_an_operation_is_active_until_it_has_ended() -> None:
    over = replace(MOVE, ended_at=61.0, outcome="completed")
    assert (MOVE.active, over.active) == (True, False)
    told = over.as_json()
    assert (told["job"], told["outcome"]) == ("m-1", "completed")
    assert told["began"] == "1970-01-01T00:00:00.250+00:00"
    assert told["ended"] == "1970-01-01T00:01:01.000+00:00"
    assert told["controller"] == {"host": "desk", "pid": 7}


def test_a_controller_that_is_nobody_is_not_missed() -> None:
    assert not HERE.entrusted
    assert replace(HERE, boot="").entrusted


def test_of_two_batches_the_later_one_counts_and_nothing_is_lost() -> None:
    first = Batch(
        changes=Changes(phase="setup", mode="precopy"), events=[FIRST], answers=[(1, True, "yes")],
        ending=("failed", None),
    )  # fmt: skip
    second = Batch(changes=Changes(phase="pre-copy"), events=[SECOND], samples=[SECOND])
    both = first.then(second)
    assert both.changes == {"phase": "pre-copy", "mode": "precopy"}
    assert (both.events, both.samples) == ([FIRST, SECOND], [SECOND])
    assert (both.answers, both.ending) == ([(1, True, "yes")], ("failed", None))
    assert first.events == [FIRST]
    assert second.then(Batch(ending=("completed", {}))).ending == ("completed", {})


def test_a_batch_with_nothing_in_it_is_none() -> None:
    assert not Batch()
    assert not Batch().then(Batch())
    for one in (
        Batch(changes=Changes(phase="x")), Batch(events=[FIRST]), Batch(samples=[FIRST]),
        Batch(answers=[(1, False, "no")]), Batch(ending=("failed", None)),
    ):  # fmt: skip
        assert one


@pytest.mark.parametrize(
    ("outcome", "became"),
    [
        (Outcome.COMPLETED, StepState.DONE), (Outcome.CANCELLED, StepState.UNDONE),
        (Outcome.FAILED, StepState.UNDONE), (Outcome.BLOCKED, StepState.UNDONE),
        ("died", StepState.FAILED),
    ],
)  # fmt: skip
def test_open_steps_end_as_their_operation_did(outcome: str, became: StepState) -> None:
    assert became_of_steps(outcome) is became


def test_times_are_printed_in_utc_and_milliseconds() -> None:
    assert utc(None) is None
    event = StoredEvent(seq=1, at=Seconds(0.12345), kind="noted", values={"a": 1})
    assert event.as_json() == {"at_ms": 123.5, "kind": "noted", "a": 1}
    sample = StoredSample(seq=1, at=Seconds(2.0), values={"done": 0.5})
    assert (sample.done, sample.as_json()) == (0.5, {"at_ms": 2000.0, "done": 0.5})
    assert StoredSample(seq=1, at=Seconds(2.0), values={}).done == 0.0


def test_a_step_and_a_request_say_what_nobody_has_answered_yet() -> None:
    step = StoredStep(
        seq=3, name="define", intent={"host": "beta"}, state=StepState.INTENDED, result=None,
        began_at=0.0, ended_at=None,
    )  # fmt: skip
    assert step.as_json()["result"] is None
    assert step.as_json()["state"] == "intended"
    request = Request(
        id=1, operation="m-1", kind="cancel", arguments={}, asked_by="eve@desk", asked_at=0.0,
        taken_at=None, answered_at=None, ok=None, answer=None,
    )  # fmt: skip
    assert (request.as_json()["ok"], request.as_json()["answered"]) == (None, None)
