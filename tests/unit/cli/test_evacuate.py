"""What is asked before a host is emptied, and what is said afterwards."""

import io
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fleets import guest
from tests.support.rooms import goes
from vmckpt.cli import evacuate, output
from vmckpt.errors import Blocked
from vmckpt.evacuation.interfaces import MoveEnd
from vmckpt.evacuation.plan.forecast import PlanForecast
from vmckpt.evacuation.plan.placement import Assignment, Unplaced
from vmckpt.evacuation.plan.plan import Checked, Plan
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task
from vmckpt.migration.forecast.forecast import Range
from vmckpt.units import Seconds

ORDER = Task(kind=Kind.EVACUATE, host="alpha")


class Interrupted(io.StringIO):
    """Somebody presses Ctrl-C instead of answering."""

    def readline(self, *_: object) -> str:  # type: ignore[override]
        signal.raise_signal(signal.SIGINT)
        return "y\n"


@pytest.mark.parametrize(
    ("answer", "agreed"),
    [(io.StringIO("y\n"), True), (io.StringIO("\n"), False), (Interrupted(), False)],
)
def test_who_does_not_say_yes_has_not_agreed(
    monkeypatch: pytest.MonkeyPatch, answer: io.StringIO, agreed: bool
) -> None:
    later: list[int] = []
    # Once guests are moving Ctrl-C stops the run: as here, it raises nothing.
    before = signal.signal(signal.SIGINT, lambda number, _: later.append(number))
    monkeypatch.setattr(sys, "stdin", answer)
    try:
        assert evacuate._agreed(ORDER) is agreed
        assert later == []
        signal.raise_signal(signal.SIGINT)
        assert later == [signal.SIGINT], "it means again what it meant before"
    finally:
        signal.signal(signal.SIGINT, before)


def test_guests_that_are_off_are_named_and_so_is_the_way_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = MoveEnd(arrived=(), shut_down=(), left=(), stopped=False, took=Seconds(5.0))
    evacuate.show_report(
        Report(
            task=ORDER,
            job="e-1",
            ended=ended,
            shut_down=("u-1", "u-2", "u-3"),
            suspended=frozenset({"u-2"}),
            names={"u-1": "web1", "u-2": "web2"},
        )
    )
    assert capsys.readouterr().out.splitlines()[:3] == [
        "shut down: web1; to start it again, run vmckpt repopulate alpha",
        "suspended: web2; to resume it, run vmckpt repopulate alpha",
        "shut down: u-3; to start it again, run vmckpt repopulate alpha",
    ]


def stays(name: str, why: str, hint: str = "add memory") -> Unplaced:
    return Unplaced(tenant=guest(name, "alpha"), why=why, hint=hint)


def planned(*left: Unplaced, going: tuple[Assignment, ...] = (), **changes: Any) -> Plan:
    return Plan(
        task=ORDER, going=going, left=left, shut_down=(), suspended=(), silent={},
        checks=changes.pop("checks", {}), total=Range(4.0, 9.0),
        course=PlanForecast(steps=(), loads=(), stuck=(), total=Seconds(5.0)),
        **changes,
    )  # fmt: skip


def test_all_guests_without_a_target_are_named_not_the_first() -> None:
    left = [stays("web1", "no memory"), stays("db1", "it uses a GPU"), stays("web2", "no memory")]
    with pytest.raises(Blocked) as caught:
        evacuate._refuse(planned(*left), ORDER, partly=False)

    assert caught.value.message == (
        "3 guests cannot be moved: web1, web2: no memory; db1: it uses a GPU; nothing was changed"
    )
    assert caught.value.hint == "add memory; or use --partly to move the others"


def test_guests_that_stay_for_several_reasons_have_hints_of_their_own() -> None:
    left = [stays("web1", "no memory"), stays("db1", "it uses a GPU", "detach it")]
    with pytest.raises(Blocked) as caught:
        evacuate._refuse(planned(*left), ORDER, partly=False)

    assert caught.value.hint == (
        "see the hint of each guest in the plan; or use --partly to move the others"
    )


def test_a_fleet_of_guests_is_still_one_short_line() -> None:
    left = [stays(f"web{number}", "no memory") for number in range(200)]

    assert evacuate.left_by_reason(left).endswith("web8, web9 and 190 more: no memory")


def test_a_duration_that_was_never_measured_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    move = goes("web1", "beta")
    for known, shown in ((True, "4.0 s to 9.0 s"), (False, "4.0 s or more")):
        check = Checked(
            policy="maintenance", mode="precopy", total=Range(3.0, 8.0), downtime=Range(0.1, 0.2),
            known=known,
        )  # fmt: skip
        plan = planned(going=(move,), checks={("web1", "beta"): check})
        evacuate.show_plan(plan, output.out)
        text = capsys.readouterr().out
        assert f"1 move, {shown} in total" in text
        assert ("3.0 s or more" in text) is not known
        assert plan.as_json()["total_ms"] == [4000.0, 9000.0 if known else None]
        assert plan.as_json()["moves"][0]["expected_ms"] == [3000.0, 8000.0 if known else None]


def test_many_hosts_that_do_not_answer_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    silent = {f"h{number:03}": f"h{number:03}: no route to host" for number in range(200)}
    evacuate.show_plan(replace(planned(), silent=silent), output.out)

    assert capsys.readouterr().out.splitlines()[0] == (
        "not used as targets: no answer from h000, h001, h002 and 197 more; h000: no route to host"
    )
