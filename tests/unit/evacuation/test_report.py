"""What a migration's end means for the run that it is a part of, and what is told of a run."""

from dataclasses import replace

import pytest

from tests.support.fleets import guest
from vmckpt.evacuation import report as reports
from vmckpt.evacuation.interfaces import Arrived, MoveEnd
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task
from vmckpt.journal.records import ControllerIdentity, Operation
from vmckpt.migration.report import MigrationReport
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Driver, FailureSide, JobTotals, Outcome
from vmckpt.units import Bytes, Seconds

GOOD = MigrationReport(
    guest="web1", source="alpha", target="beta", outcome=Outcome.COMPLETED,
    driver=Driver.PEER_TO_PEER, began=Seconds(0.0), elapsed=Seconds(4.0),
    totals=JobTotals(total=Seconds(3.0), setup=None, downtime=Seconds(0.08), iterations=3,
                     transferred=Bytes(1)),
    observed_downtime=None, job="m-1",
)  # fmt: skip
WEB1 = Arrived(
    guest="web1", uuid="u-1", source="alpha", target="beta", job="m-1", took=Seconds(3.0),
    downtime=Seconds(0.08),
)  # fmt: skip
LEFT = Unplaced(tenant=guest("web2", "alpha"), why="no room", hint="make some")


def test_a_good_one() -> None:
    moved = reports.judged(GOOD, "web1")
    assert (moved.good, moved.took, moved.downtime, moved.job) == (True, 3.0, 0.08, "m-1")


@pytest.mark.parametrize(
    ("outcome", "blame", "final"),
    [
        (Outcome.FAILED, FailureSide.TARGET, ""),
        (Outcome.BLOCKED, FailureSide.TARGET, ""),
        (Outcome.NOT_CONVERGED, FailureSide.GUEST, ""),
        (Outcome.TIMED_OUT, FailureSide.GUEST, ""),
        (Outcome.SHUT_OFF, None, "no action needed"),
        (Outcome.UNKNOWN, None, "run vmckpt recover"),
        (Outcome.POST_COPY_PAUSED, None, "see vmckpt job m-1"),
        (Outcome.LOST, None, "see vmckpt job m-1"),
        (Outcome.CANCELLED, None, "see vmckpt job m-1"),
    ],
)
def test_a_bad_one_is_tried_again_only_where_that_harms_nobody(
    outcome: Outcome, blame: FailureSide | None, final: str
) -> None:
    moved = reports.judged(replace(GOOD, outcome=outcome, error="it said no"), "web1")
    assert not moved.good
    assert moved.final == final
    if blame is not None:
        assert (moved.blame, moved.why) == (blame, "it said no")


def test_every_outcome_means_something() -> None:
    for outcome in Outcome:
        assert reports.judged(replace(GOOD, outcome=outcome), "web1").good == (
            outcome is Outcome.COMPLETED
        )


def test_what_preflight_found_is_why() -> None:
    blocker = Finding(code="memory-room", severity=Severity.BLOCKER, where="beta", text="full")
    blocked = replace(GOOD, outcome=Outcome.BLOCKED, findings=(blocker,))
    assert reports.judged(blocked, "web1").why == "beta: full"


def test_a_guest_that_libvirt_or_preflight_refuses_takes_no_host_out() -> None:
    refused = replace(GOOD, outcome=Outcome.FAILED, error="no", refused=FailureSide.GUEST)
    there = replace(refused, refused=FailureSide.TARGET)
    own = Finding(code="disk-transient", severity=Severity.BLOCKER, where="web1", text="is so")
    blocked = replace(GOOD, outcome=Outcome.BLOCKED, findings=(own,))

    assert reports.judged(refused, "web1").final == "fix the reason, then run the command again"
    assert reports.judged(there, "web1").final == ""
    assert reports.judged(there, "web1").blame is FailureSide.TARGET
    assert reports.judged(blocked, "web1").blame is FailureSide.GUEST


def told(*left: Unplaced, stopped: bool = False, earlier: tuple[Arrived, ...] = ()) -> Report:
    ended = MoveEnd(arrived=(WEB1,), shut_down=(), left=left, stopped=stopped, took=Seconds(5.0))
    return Report(task=Task(kind=Kind.EVACUATE, host="alpha"), job="e-1", ended=ended,
                  earlier=earlier)  # fmt: skip


def test_how_a_run_ended() -> None:
    assert told().outcome is Outcome.COMPLETED
    assert told(LEFT).outcome is Outcome.FAILED
    assert told(LEFT, stopped=True).outcome is Outcome.CANCELLED
    assert told(stopped=True).outcome is Outcome.COMPLETED


def test_who_was_moved_by_an_earlier_controller_is_told_once() -> None:
    before = replace(WEB1, guest="web0", uuid="u-0", job="m-0")
    report = told(LEFT, earlier=(before, WEB1))
    assert [one.guest for one in report.arrived] == ["web0", "web1"]
    json = report.as_json()
    assert [(one["guest"], one["guest_uuid"]) for one in json["moved"]] == [
        ("web0", "u-0"), ("web1", "u-1"),
    ]  # fmt: skip
    assert json["left"] == [
        {"guest": "web2", "on": "alpha", "why": "no room", "hint": "make some", "mend": "make some"}
    ]


INTENT = {
    "guest": "db", "uuid": "u-9", "from": "alpha", "to": "gamma",
    "command": "vmckpt protect db --to gamma",
}  # fmt: skip


def protection(target: str, phase: str | None = "protecting") -> Operation:
    return Operation(
        id="p-1", kind="protect", guest="db", guest_uuid="u-9", source="beta", target=target,
        policy=None, mode=None, state="running", phase=phase, outcome=None, asked_by="eve@desk",
        asked_from=None, controller=ControllerIdentity(host="beta", boot="", pid=1, started=0),
        began_at=0.0, ended_at=None, detail={}, report=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("active", "hint"),
    [
        pytest.param([protection("gamma")], None, id="it waits there"),
        pytest.param([protection("delta")], None, id="somebody has protected it elsewhere"),
        pytest.param([], "vmckpt protect db --to gamma", id="it has none"),
        pytest.param(
            [protection("alpha")], "vmckpt unprotect db, then vmckpt protect db --to gamma",
            id="its end came half-way",
        ),
        pytest.param(
            [protection("gamma", "starting")],
            "vmckpt unprotect db, then vmckpt protect db --to gamma",
            id="its beginning came half-way",
        ),
    ],
)  # fmt: skip
def test_who_was_to_have_another_standby_has_one_or_is_told_of(
    active: list[Operation], hint: str | None
) -> None:
    earlier = {**INTENT, "to": "beta", "command": "another"}
    wait, bare = reports.standbys([earlier, INTENT], active)

    assert [one.hint for one in bare] == ([] if hint is None else [hint])
    assert [(one.guest, one.target, one.standby) for one in wait] == (
        [("db", "gamma", True)] if hint is None else []
    )


def test_a_guest_elsewhere_that_has_lost_its_standby_is_no_good_end() -> None:
    ended = MoveEnd(arrived=(), shut_down=(), left=(), stopped=False, took=Seconds(9.0))
    task = Task(kind=Kind.EVACUATE, host="alpha")
    _, bare = reports.standbys([INTENT], [])
    told = Report(task=task, job="e-1", ended=ended, bare=bare)

    assert told.outcome is Outcome.FAILED
    assert told.as_json()["unprotected"] == [
        {
            "guest": "db",
            "guest_uuid": "u-9",
            "hint": INTENT["command"],
            "mend": INTENT["command"],
        }
    ]
    assert not told.comes_back


def test_a_guest_that_a_step_moved_is_where_the_last_one_went_unless_it_was_left() -> None:
    intents = [
        {"guest": "off1", "called": "off1", "uuid": "u-1", "from": "alpha", "to": "beta"},
        {"guest": "off2", "called": "off2", "uuid": "u-2", "from": "alpha", "to": "beta"},
        {"guest": "off1", "called": "off1", "uuid": "u-1", "from": "alpha", "to": "gamma"},
        {"guest": "old", "uuid": "u-3", "from": "alpha", "to": "gamma"},
    ]
    found = reports.stepped(intents, {"off2"})
    assert [(one.guest, one.target) for one in found] == [("off1", "gamma"), ("old", "gamma")]
    assert not reports.stepped(intents[3:], {"old"})
