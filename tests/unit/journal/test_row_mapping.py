"""Rows of the journal's tables and what they mean: nothing is lost either way."""

from typing import Any, cast

from sqlalchemy import RowMapping

from vmckpt.journal import row_mapping, schema
from vmckpt.journal.records import ControllerIdentity, NewOperation, StepState

HERE = ControllerIdentity(host="desk", boot="b-1", pid=7, started=9)
NEW = NewOperation(
    kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta", policy="fast",
    mode="precopy", detail={"wishes": {"ratio": float("inf")}, "hosts": ("a", "b")},
)  # fmt: skip


def row(**columns: Any) -> RowMapping:
    return cast("RowMapping", columns)


def test_an_operation_that_begins_is_read_as_it_was_meant() -> None:
    begun = row_mapping.new_operation(NEW, HERE, asked_by="eve@desk", asked_from="192.0.2.7")
    assert set(begun) <= set(schema.operations.c.keys())
    found = row_mapping.operation(
        row(
            **begun, id="m-1", phase=None, outcome=None, began_at=5.0, ended_at=None, report=None,
            alive_until=None,
        )
    )  # fmt: skip
    for name in ("kind", "guest", "guest_uuid", "source", "target", "policy", "mode"):
        assert getattr(found, name) == getattr(NEW, name)
    assert found.detail == {"wishes": {"ratio": None}, "hosts": ["a", "b"]}
    assert (found.controller, found.asked_by, found.asked_from) == (HERE, "eve@desk", "192.0.2.7")
    assert (found.state, found.active) == ("running", True)


def test_the_columns_of_a_controller_are_those_that_it_is_read_from() -> None:
    columns = row_mapping.controlled_by(HERE)
    assert set(columns) == {f"controller_{part}" for part in row_mapping.CONTROLLER}
    assert row_mapping.controller(row(**columns)) == HERE


def test_what_an_operation_told_is_read_with_its_number_and_time() -> None:
    event = row_mapping.stored_event(row(seq=3, at=1.5, kind="noted", data={"a": 1}))
    assert (event.seq, event.at, event.kind, event.values) == (3, 1.5, "noted", {"a": 1})
    sample = row_mapping.stored_sample(row(seq=4, at=2.5, data={"done": 0.5}))
    assert (sample.seq, sample.at, sample.done) == (4, 2.5, 0.5)
    forecast = row_mapping.stored_forecast(row(made_at=9.0, data={"total_ms": 5}))
    assert (forecast.made_at, forecast.values) == (9.0, {"total_ms": 5})
    step = row_mapping.stored_step(
        row(seq=1, name="define", intent={"host": "beta"}, state="undone", result=None,
            began_at=1.0, ended_at=2.0)
    )  # fmt: skip
    assert (step.state, step.intent, step.ended_at) == (StepState.UNDONE, {"host": "beta"}, 2.0)
