"""Which alerts are active, and what an Alertmanager has to know."""

from dataclasses import replace
from typing import Any

import pytest

from tests.tui.still import operation
from vmckpt.journal.follow import BEGAN, ENDED, WORK_DONE, WORK_FAILED, Happening
from vmckpt.model.migration import Outcome
from vmckpt.monitor import active_alerts, alerts
from vmckpt.monitor.active_alerts import (
    EMPTY,
    LIFETIME,
    VALID,
    Events,
    board_after,
    current,
    events_after,
    is_news,
)
from vmckpt.monitor.alerts import PATIENCE, Page, State
from vmckpt.monitor.health import Trouble
from vmckpt.units import Seconds

AT = 1_800_000_000.0


def ended(outcome: str, kind: str = "migrate", at: float = AT, **report: Any) -> Happening:
    one = replace(operation("m-1", kind), guest="web1", outcome=outcome, report=report)
    values = {"outcome": outcome, "error": report.get("error")}
    return Happening(at=at, kind=ENDED, operation=one, values=values)


def began(kind: str) -> Happening:
    return replace(ended("", kind), kind=BEGAN, values={})


def after(*happened: Happening, now: float = AT) -> list[str]:
    return sorted(page.key for page in events_after({}, happened, now).values())


@pytest.mark.parametrize(
    ("happened", "active"),
    [
        ([ended("failed")], ["failed migrate web1"]),
        ([ended("lost")], ["unsure migrate web1"]),
        ([ended("completed")], []),
        ([ended("cancelled")], []),
        # The next success of the same kind ends it, and no other.
        ([ended("failed"), ended("completed")], []),
        ([ended("failed"), ended("failed"), ended("completed")], []),
        ([ended("lost"), ended("completed")], []),
        ([ended("failed"), ended("completed", "snapshot")], ["failed migrate web1"]),
        ([ended("failed"), ended("cancelled")], ["failed migrate web1"]),
        ([ended("failed", "snapshot"), ended("completed", "snapshot")], []),
        # The latest failure counts.
        ([ended("failed"), ended("unknown")], ["unsure migrate web1"]),
        ([ended("unknown"), ended("failed")], ["failed migrate web1"]),
        # What an operator closed by hand is not reported.
        ([ended("unknown", forgotten_by="eve@desk")], []),
        ([ended("unknown"), ended("unknown", forgotten_by="eve@desk")], []),
        # A failover lasts until the guest is protected again.
        ([ended("completed", "protect", failed_over="beta")], ["failover web1"]),
        ([ended("failed", "protect", failed_over="beta")], ["failover web1"]),
        ([ended("completed", "protect", failed_over="beta"), began("protect")], []),
        ([ended("completed", "protect", failed_over="beta"), began("migrate")], ["failover web1"]),
    ],
)
def test_an_event_is_active_until_it_is_over(happened: list[Happening], active: list[str]) -> None:
    assert after(*happened) == active


def test_an_event_ends_after_a_day_in_any_case() -> None:
    assert after(ended("failed"), now=AT + LIFETIME - 1) == ["failed migrate web1"]
    assert after(ended("failed"), now=AT + LIFETIME) == []


def work(times: int, kind: str = WORK_FAILED, job: str = "r-1") -> Happening:
    values: dict[str, str | int] = {
        "key": "copy s-1 far", "work": "copy of snapshot s-1 (web1) to far",
    }  # fmt: skip
    if kind == WORK_FAILED:
        values |= {"guest": "web1", "why": "no space", "times": times}
    return Happening(at=AT, kind=kind, operation=operation(job, "run"), values=values)


def stopped(job: str) -> Happening:
    done = operation(job, "run", outcome="completed", report={})
    return Happening(at=AT, kind=ENDED, operation=done, values={"outcome": "completed"})


@pytest.mark.parametrize(
    ("happened", "active"),
    [
        ([work(1)], []),
        ([work(1), work(2)], ["work copy s-1 far"]),
        ([work(7)], ["work copy s-1 far"]),
        ([work(2), work(0, WORK_DONE)], []),
        ([work(2), stopped("r-1")], []),
        ([work(2), stopped("r-2")], ["work copy s-1 far"]),
    ],
)
def test_scheduled_work_that_fails_twice_is_active(
    happened: list[Happening], active: list[str]
) -> None:
    assert after(*happened) == active


def test_scheduled_work_that_fails_causes_one_message() -> None:
    pages = [alerts.of_happening(work(times)) for times in (1, 2, 3)]
    assert (pages[0], pages[2]) == (None, None)
    page = pages[1]
    assert page is not None
    assert page.state is State.ONCE
    assert page.trouble == Trouble(
        text="copy of snapshot s-1 (web1) to far has failed 2 times: no space",
        hint="run vmckpt job r-1", job="r-1", guest="web1",
    )  # fmt: skip


def lasting(key: str = "host alpha", seconds: float = PATIENCE) -> Any:
    trouble = Trouble(text="alpha is silent", hint="run vmckpt doctor alpha", host="alpha")
    known, _ = alerts.watch({}, {key: trouble}, Seconds(5.0), AT)
    known, _ = alerts.watch(known, {key: trouble}, Seconds(5.0 + seconds), AT + seconds)
    return known


def test_a_problem_is_active_once_it_has_been_reported() -> None:
    assert list(current(lasting(seconds=PATIENCE - 1), {})) == []
    (one,) = current(lasting(), {})
    assert one.as_json(AT + 400) == {
        "labels": {
            "alertname": "VmckptHostSilent", "severity": "page", "service": "vmckpt",
            "key": "host alpha", "host": "alpha",
        },
        "annotations": {"summary": "alpha is silent", "hint": "run vmckpt doctor alpha"},
        "startsAt": "2027-01-15T08:00:00.000+00:00", "endsAt": "2027-01-15T08:06:40.000+00:00",
    }  # fmt: skip


def test_a_failed_job_names_itself_but_is_the_same_alert_as_the_next_one() -> None:
    first = events_after({}, [ended("failed", error="no space")], AT)
    again = ended("failed", error="no route")
    again = replace(again, operation=replace(again.operation, id="m-2"))
    second = events_after(first, [again], AT)
    before, later = (next(iter(current({}, one))) for one in (first, second))
    assert before.labels == later.labels
    assert later.as_json(AT)["annotations"] == {
        "summary": "migrate of web1 ended: failed: no route", "hint": "run vmckpt job m-2",
        "job": "m-2",
    }  # fmt: skip


@pytest.mark.parametrize("key", list(active_alerts._NAMES))
def test_every_problem_has_a_name_and_a_severity(key: str) -> None:
    page = Page(key=f"{key} x", state=State.FIRING, at=AT, trouble=Trouble(text="t", hint="h"))
    labels = dict(active_alerts.of_page(page).labels)
    assert labels["alertname"].startswith("Vmckpt")
    assert labels["severity"] in ("page", "ticket")


def test_a_name_that_is_not_text_spoils_no_request() -> None:
    trouble = Trouble(text="t", hint="h", guest="a\udcff")
    page = Page(key="copies u-1", state=State.FIRING, at=AT, trouble=trouble)
    assert dict(active_alerts.of_page(page).labels)["guest"] == "a?"


def test_the_board_keeps_the_end_of_an_alert_for_a_while() -> None:
    active = current(lasting(), {})
    first = board_after(EMPTY, active, AT)
    (one,) = first.values()
    assert one.as_json(AT) == one.alert.as_json(AT + VALID)
    assert is_news(EMPTY, first)

    same = board_after(first, active, AT + 60)
    assert not is_news(first, same)

    over = board_after(same, [], AT + 100)
    assert is_news(same, over)
    (one,) = over.values()
    assert one.as_json(AT + 160)["endsAt"] == one.alert.as_json(AT + 100)["endsAt"]
    later = board_after(over, [], AT + 900)
    assert (later, is_news(over, later)) == (over, False)
    assert board_after(later, [], AT + 1000) == {}

    back = board_after(over, active, AT + 200)
    assert is_news(over, back)
    assert [one.ended for one in back.values()] == [None]


def test_every_key_of_a_problem_is_known() -> None:
    """Of those in tests/unit/monitor/test_health.py, by the first word."""
    events: Events = events_after({}, [ended("failed"), ended("lost", "restore")], AT)
    words = {page.key.partition(" ")[0] for page in events.values()}
    assert words == {"failed", "unsure"}
    assert words < set(active_alerts._NAMES)
    assert Outcome.LOST in alerts.UNSURE
