"""Decide which alerts are active, in Alertmanager's form. Time is an argument. Pure.

All active alerts must be sent to an Alertmanager repeatedly, so each alert needs an end. The alert
for a failed job ends with the next success of the same kind for the same guest, or after LIFETIME.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from vmckpt.journal.follow import BEGAN, ENDED, WORK_DONE, WORK_FAILED, Happening
from vmckpt.journal.records import FORGOTTEN
from vmckpt.model.migration import Outcome
from vmckpt.monitor import alerts
from vmckpt.monitor.alerts import Lasting, Page, State
from vmckpt.units import Seconds
from vmckpt.util.unicode_text import encodable

LIFETIME = Seconds(86400.0)
"""How long the alert for an event, such as a failed job, stays active if no later event ends it."""
VALID = Seconds(300.0)
"""How long an active alert stays active in Alertmanager if it is not sent again."""
_REPEATED = Seconds(900.0)
"""How long the end of an alert is sent again: an Alertmanager may have been restarted meanwhile."""

_PAGE, _TICKET = "page", "ticket"
_NAMES = {
    "host": ("VmckptHostSilent", _PAGE), "copies": ("VmckptTwoCopies", _PAGE),
    "job": ("VmckptJobUnattended", _PAGE), "stream": ("VmckptPostCopyBroken", _PAGE),
    "protection": ("VmckptStandbyNotReady", _PAGE), "store": ("VmckptStoreSilent", _TICKET),
    "snapshot": ("VmckptSnapshotDamaged", _PAGE), "unsure": ("VmckptGuestUnsure", _PAGE),
    "failed": ("VmckptJobFailed", _TICKET), "failover": ("VmckptFailedOver", _PAGE),
    "work": ("VmckptScheduleFails", _TICKET), "test": ("VmckptTest", _TICKET),
}  # fmt: skip
"""The alert's name and severity, by the first word of the problem's key. The names are those of
packaging/prometheus/alerts.yaml if it has a rule for the same problem."""

Labels = tuple[tuple[str, str], ...]
Events = Mapping[tuple[str, str], Page]
"""Active events by kind of operation, or "failover", and the name of the guest or host; events
of scheduled work, by "work" and the work's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAlert:
    """An alert as Alertmanager identifies it."""

    labels: Labels
    page: Page

    def as_json(self, ends: float) -> dict[str, Any]:
        """Return the alert for Alertmanager's API. `ends`: when it ends, in seconds since 1970."""
        trouble = self.page.trouble
        notes = {"summary": trouble.text, "hint": trouble.hint, "job": trouble.job}
        return {
            "labels": dict(self.labels),
            "annotations": {name: value for name, value in notes.items() if value},
            "startsAt": _time(min(self.page.at, ends)), "endsAt": _time(ends),
        }  # fmt: skip


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def of_page(page: Page) -> ActiveAlert:
    """Return the alert for a problem, with the labels that identify it."""
    name, severity = _NAMES[page.key.partition(" ")[0]]
    found = {
        "alertname": name, "severity": severity, "service": "vmckpt", "key": page.key,
        "guest": page.trouble.guest, "host": page.trouble.host,
    }  # fmt: skip
    # Alertmanager refuses all alerts of a request that contains an invalid label.
    labels = tuple((label, encodable(value)) for label, value in found.items() if value)
    return ActiveAlert(labels=labels, page=page)


def current(lasting: Mapping[str, Lasting], events: Events) -> Collection[ActiveAlert]:
    """Return the alerts for all problems that were reported, and for the active events."""
    pages = [
        Page(key=key, state=State.FIRING, at=one.at, trouble=one.trouble)
        for key, one in lasting.items() if one.paged
    ]  # fmt: skip
    return [of_page(one) for one in (*pages, *events.values())]


def events_after(known: Events, happened: Iterable[Happening], now: float) -> Events:
    """Return the events that are active after further events.

    `known`: the active events so far. `happened`: the further events, the oldest first. `now`:
    seconds since 1970.
    """
    events = dict(known)
    for one in happened:
        operation = one.operation
        kind, name = operation.kind, operation.guest
        if one.kind == BEGAN and kind == "protect":
            events.pop(("failover", name), None)
        if one.kind in (WORK_FAILED, WORK_DONE):
            _take_work(events, one)
        if one.kind != ENDED:
            continue
        # A new service reports the failures of its own work.
        for key in [each for each, page in events.items() if _is_work_of(operation.id, each, page)]:
            del events[key]
        page = alerts.of_happening(one)
        if page is not None:
            events.update([_event(one, page)])
        elif one.values["outcome"] == Outcome.COMPLETED or FORGOTTEN in (operation.report or {}):
            events.pop((kind, name), None)
    return {key: page for key, page in events.items() if now - page.at < LIFETIME}


def _take_work(events: dict[tuple[str, str], Page], one: Happening) -> None:
    key = ("work", str(one.values["key"]))
    if one.kind == WORK_DONE:
        events.pop(key, None)
    elif one.values["times"] >= alerts.TWICE:
        events[key] = replace(alerts.of_work(one), state=State.FIRING)


def _is_work_of(job: str, key: tuple[str, str], page: Page) -> bool:
    return key[0] == "work" and page.trouble.job == job


def _event(one: Happening, page: Page) -> tuple[tuple[str, str], Page]:
    operation = one.operation
    if (operation.report or {}).get("failed_over"):
        kind = word = "failover"
    else:
        kind = operation.kind
        word = "unsure" if one.values["outcome"] in alerts.UNSURE else "failed"
    key = " ".join(dict.fromkeys((word, kind, operation.guest)))
    return (kind, operation.guest), replace(page, key=key, state=State.FIRING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An alert to send to an Alertmanager: active, or ended recently."""

    alert: ActiveAlert
    ended: float | None
    """When the alert ended, in seconds since 1970; None: it is active."""

    def as_json(self, now: float) -> dict[str, Any]:
        return self.alert.as_json(now + VALID if self.ended is None else self.ended)


Board = Mapping[Labels, Sent]
EMPTY: Board = MappingProxyType({})


def board_after(board: Board, active: Collection[ActiveAlert], now: float) -> Board:
    """Return the alerts to send to an Alertmanager: active alerts, and those that ended recently.

    `board`: the alerts sent before. `now`: seconds since 1970.
    """
    found = {one.labels: Sent(alert=one, ended=None) for one in active}
    for labels, one in board.items():
        ended = now if one.ended is None else one.ended
        if labels not in found and now - ended < _REPEATED:
            found[labels] = replace(one, ended=ended)
    return found


def is_news(before: Board, after: Board) -> bool:
    """Return whether alerts have begun or ended, which must be sent at once."""
    ends = {labels: one.ended for labels, one in before.items()}
    return any(labels not in ends or ends[labels] != one.ended for labels, one in after.items())
