"""Decide which problems the operator is alerted to, and when. Time is an argument. Pure."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vmckpt.journal.follow import ENDED, WORK_FAILED, Happening
from vmckpt.journal.records import FORGOTTEN, utc
from vmckpt.model.migration import Outcome
from vmckpt.monitor.health import Trouble
from vmckpt.units import Seconds

PATIENCE = Seconds(30.0)
"""How long a problem must last before an alert is sent: a silent host may answer the next poll, and
a standby may catch up."""
TWICE = 2
"""Number of consecutive failures of scheduled work for which an alert is sent: the first failure is
retried within a minute."""
UNSURE = (Outcome.LOST, Outcome.UNKNOWN, Outcome.POST_COPY_PAUSED)
_BAD = (*UNSURE, Outcome.FAILED, Outcome.NOT_CONVERGED, Outcome.TIMED_OUT, Outcome.SHUT_OFF)
_NAMESPACE = uuid.UUID("5a2d3c5e-5f0b-4d52-9b38-0f7a1c8f7c11")


class State(StrEnum):
    """The state of the problem that an alert reports."""

    FIRING = "firing"
    RESOLVED = "resolved"
    """The problem is over."""
    ONCE = "once"
    """An event rather than an ongoing problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An alert, which is sent to the receivers in the inventory."""

    key: str
    """Identifies the problem; its alerts "firing" and "resolved" have the same key."""
    state: State
    at: float
    """The time of the alert, in seconds since 1970."""
    trouble: Trouble

    def as_json(self) -> dict[str, Any]:
        """Return the body to post. The alert has the same ID when it is sent again."""
        one = self.trouble
        id_ = uuid.uuid5(_NAMESPACE, f"{self.key} {self.state} {self.at}")
        return {
            "version": 1, "id": str(id_), "at": utc(self.at), "state": str(self.state),
            "key": self.key, "text": one.text, "hint": one.hint,
            "mend": one.hint, "job": one.job, "guest": one.guest, "host": one.host,
        }  # fmt: skip


def of_happening(one: Happening) -> Page | None:
    """Return the alert for an event, or None if the event needs no attention."""
    if one.kind == WORK_FAILED:
        return of_work(one) if one.values["times"] == TWICE else None
    operation = one.operation
    if one.kind != ENDED:
        return None
    outcome, report = str(one.values["outcome"]), operation.report or {}
    if FORGOTTEN in report:
        return None  # an operator closed the job by hand
    if operation.kind == "protect" and report.get("failed_over"):
        why = f": {report['why']}" if report.get("why") else ""  # recover may not know it
        text = f"{operation.guest} has failed over to {report['failed_over']}{why}"
        hint = (
            f"once {operation.source} is up again, run vmckpt protect {operation.guest} --reverse"
        )
        return _page(one, text, hint)
    part = operation.detail.get("part_of") is not None
    # An evacuation retries a failed migration, and reports the remaining guests when it ends.
    if outcome not in (UNSURE if part else _BAD):
        return None
    error = f": {one.values['error']}" if one.values.get("error") else ""
    text = f"{operation.kind} of {operation.guest} ended: {outcome}{error}"
    sure = outcome not in UNSURE
    hint = f"run vmckpt job {operation.id}" if sure else "run vmckpt recover"
    return _page(one, text, hint)


def of_work(one: Happening) -> Page:
    """Return the alert for scheduled work that fails repeatedly."""
    values, job = one.values, one.operation.id
    text = f"{values['work']} has failed {values['times']} times: {values['why']}"
    trouble = Trouble(text=text, hint=f"run vmckpt job {job}", job=job, guest=values["guest"])
    return Page(key=f"work {values['key']}", state=State.ONCE, at=one.at, trouble=trouble)


def _page(one: Happening, text: str, hint: str) -> Page:
    operation = one.operation
    trouble = Trouble(
        text=text, hint=hint, job=operation.id, guest=operation.guest, host=operation.source
    )
    return Page(key=f"ended {operation.id}", state=State.ONCE, at=one.at, trouble=trouble)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """An ongoing problem."""

    trouble: Trouble
    since: Seconds
    """When the problem was first seen, by a monotonic clock."""
    at: float
    """When the problem was first seen, in seconds since 1970."""
    paged: bool = False


def watch(
    known: Mapping[str, Lasting], troubles: Mapping[str, Trouble], now: Seconds, at: float
) -> tuple[Mapping[str, Lasting], Sequence[Page]]:
    """Update the ongoing problems after a poll.

    Returns the ongoing problems and the alerts to send: one for each problem that has lasted for
    PATIENCE, and another one when that problem is over. `now`: by a monotonic clock; `at`: the
    time for the alerts, in seconds since 1970.
    """
    lasting = {
        key: replace(known[key], trouble=one) if key in known
        else Lasting(trouble=one, since=now, at=at)
        for key, one in troubles.items()
    }  # fmt: skip
    due = [key for key, one in lasting.items() if not one.paged and now - one.since >= PATIENCE]
    pages = [Page(key=key, state=State.FIRING, at=at, trouble=lasting[key].trouble) for key in due]
    pages += _over(known, lasting, at)
    return lasting | {key: replace(lasting[key], paged=True) for key in due}, pages


def _over(
    known: Mapping[str, Lasting], lasting: Mapping[str, Lasting], at: float
) -> Iterable[Page]:
    for key, one in known.items():
        if one.paged and key not in lasting:
            yield Page(key=key, state=State.RESOLVED, at=at, trouble=one.trouble)
