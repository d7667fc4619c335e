"""The moves of a job that is about a whole host, as the journal tells them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.journal.desk import JobView
from vmckpt.journal.records import Operation, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One guest that is to move, and how far that is."""

    guest: str
    source: str
    target: str
    begins: float | None
    """As planned, in seconds from the beginning; None: it was not planned."""
    ends: float | None
    view: JobView | None
    """Its last attempt; None: it waits, or it is no migration."""
    tries: int

    @property
    def state(self) -> str:
        return "waits" if self.view is None else self.view.doing


def turns(operation: Operation, parts: Sequence[JobView]) -> Sequence[Turn]:
    """All moves in their order: as they were begun, then as they are planned."""
    tries: dict[str, list[JobView]] = {}
    for one in parts:
        if (one.operation.report or {}).get("dismissed"):
            continue  # it never had its turn
        tries.setdefault(one.operation.guest, []).append(one)
    planned: Mapping[str, Mapping[str, Any]] = {
        str(one["guest"]): one for one in operation.detail.get("moves") or ()
    }
    found = []
    for guest, views in tries.items():
        last, plan = views[-1].operation, planned.get(guest, {})
        found.append(
            Turn(guest=guest, source=last.source or "", target=last.target or "",
                 begins=_seconds(plan.get("begins_ms")), ends=_seconds(plan.get("ends_ms")),
                 view=views[-1], tries=len(views))
        )  # fmt: skip
    waiting = [
        Turn(guest=guest, source=str(one["from"]), target=str(one["to"]),
             begins=_seconds(one.get("begins_ms")), ends=_seconds(one.get("ends_ms")), view=None,
             tries=0)
        for guest, one in planned.items() if guest not in tries
    ]  # fmt: skip
    return [*found, *sorted(waiting, key=lambda one: (one.begins is None, one.begins or 0.0))]


def _seconds(value: float | None) -> float | None:
    return None if value is None else value / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How far it is."""

    arrived: int
    moving: int
    waiting: int
    failed: int

    @property
    def done(self) -> float:
        every = self.arrived + self.moving + self.waiting + self.failed
        return self.arrived / every if every else 1.0


def summary(found: Sequence[Turn]) -> Summary:
    """Count the moves."""
    arrived = sum(one.state == "completed" for one in found)
    active = sum(one.view is not None and one.view.operation.active for one in found)
    ready = sum(one.state == State.WAITING for one in found)
    moving, waiting = active - ready, ready + sum(one.view is None for one in found)
    return Summary(
        arrived=arrived, moving=moving, waiting=waiting,
        failed=len(found) - arrived - moving - waiting,
    )  # fmt: skip
