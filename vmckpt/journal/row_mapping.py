"""Convert between rows of the journal's tables and records. Pure."""

from typing import Any

from sqlalchemy import RowMapping

from vmckpt.journal.records import (
    ControllerIdentity,
    NewOperation,
    Operation,
    Request,
    State,
    StepState,
    StoredEvent,
    StoredForecast,
    StoredSample,
    StoredStep,
)
from vmckpt.journal.serialization import plain
from vmckpt.units import Seconds


def new_operation(
    new: NewOperation, controller: ControllerIdentity, *, asked_by: str, asked_from: str | None
) -> dict[str, Any]:
    """Build the row of a new operation, without ID and times."""
    return {
        "kind": new.kind,
        "guest": new.guest,
        "guest_uuid": new.guest_uuid,
        "source": new.source,
        "target": new.target,
        "policy": new.policy,
        "mode": new.mode,
        "state": State.RUNNING,
        "asked_by": asked_by,
        "asked_from": asked_from,
        **controlled_by(controller),
        "thinned": 0,
        "detail": plain(new.detail),
    }


def controlled_by(controller: ControllerIdentity) -> dict[str, Any]:
    """Return the columns of an operation's row that describe its controller."""
    return {
        "controller_host": controller.host,
        "controller_boot": controller.boot,
        "controller_pid": controller.pid,
        "controller_started": controller.started,
    }


CONTROLLER = ("host", "boot", "pid", "started")


def controller(row: RowMapping) -> ControllerIdentity:
    """Read the controller from an operation's row."""
    return ControllerIdentity(
        host=row["controller_host"],
        boot=row["controller_boot"],
        pid=row["controller_pid"],
        started=row["controller_started"],
    )


def operation(row: RowMapping) -> Operation:
    """Convert a row of `operations` to a record."""
    return Operation(
        id=row["id"],
        kind=row["kind"],
        guest=row["guest"],
        guest_uuid=row["guest_uuid"],
        source=row["source"],
        target=row["target"],
        policy=row["policy"],
        mode=row["mode"],
        state=row["state"],
        phase=row["phase"],
        outcome=row["outcome"],
        asked_by=row["asked_by"],
        asked_from=row["asked_from"],
        controller=controller(row),
        began_at=row["began_at"],
        ended_at=row["ended_at"],
        detail=row["detail"],
        report=row["report"],
        alive_until=row["alive_until"],
    )


def request(row: RowMapping) -> Request:
    """Convert a row of `requests`. The row's columns are the fields of `Request`."""
    return Request(**row)


def stored_event(row: RowMapping) -> StoredEvent:
    """Convert a row of `events` to a record."""
    return StoredEvent(seq=row["seq"], at=Seconds(row["at"]), kind=row["kind"], values=row["data"])


def stored_sample(row: RowMapping) -> StoredSample:
    """Convert a row of `samples` to a record."""
    return StoredSample(seq=row["seq"], at=Seconds(row["at"]), values=row["data"])


def stored_step(row: RowMapping) -> StoredStep:
    """Convert a row of `steps` to a record."""
    return StoredStep(
        seq=row["seq"],
        name=row["name"],
        intent=row["intent"],
        state=StepState(row["state"]),
        result=row["result"],
        began_at=row["began_at"],
        ended_at=row["ended_at"],
    )


def stored_forecast(row: RowMapping) -> StoredForecast:
    """Convert a row of `forecasts` to a record."""
    return StoredForecast(made_at=row["made_at"], values=row["data"])
