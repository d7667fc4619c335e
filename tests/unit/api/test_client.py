"""What the client asks of the services, and what it returns or raises."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_answers import PROTECTED, REPORT, TAKEN, Answers, evacuated, plan, stays
from tests.support.api_answers import evacuation_plan as planned
from tests.support.builders import GUEST, HOST
from vmckpt import api
from vmckpt.api import Client
from vmckpt.app.fleet import Listing
from vmckpt.errors import Cancelled, VmckptError
from vmckpt.model.finding import Finding, Severity, blocker
from vmckpt.model.guest import Copies
from vmckpt.model.migration import Mode, Outcome
from vmckpt.policy.model import Failover

BLOCKER = Finding(
    code="room", severity=Severity.BLOCKER, where="beta", text="no room", hint="free some"
)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    made = Answers()
    made.install(monkeypatch, tmp_path)
    return made


@pytest.fixture
def client(answers: Answers) -> Client:
    return Client("hosts.yaml")


async def test_hosts_that_answer_and_hosts_that_do_not(client: Client) -> None:
    up, down = await client.hosts()
    assert (up.error, up.libvirt is not None, up.memory is not None) == (None, True, True)
    assert (down.error, down.libvirt, down.memory) == ("no route to host", None, None)


async def test_a_host_that_does_not_answer_is_an_error(client: Client, answers: Answers) -> None:
    (guest,) = await client.guests()
    assert (guest.name, guest.host, guest.memory) == (GUEST.name, HOST.name, GUEST.memory)
    answers.answers["listing"] = Listing(found=[(HOST, GUEST)], errors={"beta": "no route"})
    with pytest.raises(api.HostUnreachable, match="beta"):
        await client.guests()
    assert len(await client.guests(partly=True)) == 1


async def test_a_guest_with_two_copies_is_an_error(client: Client, answers: Answers) -> None:
    answers.answers["copies"] = (Copies(guest="web1", uuid="u", hosts=("alpha", "beta")),)
    with pytest.raises(api.TwoCopies, match="web1"):
        await client.guests(partly=True)


async def test_a_plan_has_the_findings_and_forecasts(client: Client, answers: Answers) -> None:
    found = await client.plan("web1", "beta", mode="precopy")
    made = plan()
    assert made.policy is not None
    assert (found.possible, found.mode, found.policy) == (True, "precopy", made.policy.name)
    assert [one.text for one in found.findings] == ["3 s late"]
    assert [one.mode for one in found.forecasts] == ["precopy", "postcopy"]
    assert all(one.sent is None or one.sent.low > 0 for one in found.forecasts)
    (_, request), _ = answers.last("plan")
    assert (request.dry_run, request.overrides.mode) == (True, Mode.PRECOPY)
    answers.answers["plan"] = (replace(plan(), findings=(BLOCKER,)), HOST, HOST)
    assert not (await client.plan("web1", "beta")).possible


async def test_a_migration_returns_its_figures(client: Client, answers: Answers) -> None:
    done = await client.migrate(
        "web1", "beta", policy="balanced", bandwidth=1 << 20, max_downtime=0.5, timeout=60
    )
    assert (done.guest, done.target, done.job, done.downtime) == ("web1", "beta", "m-7k3f", 0.083)
    assert done.warnings == ("3 s late",)
    assert done.details["downtime_ms"] == 83.0
    (_, request), _ = answers.last("migrate")
    assert (request.policy, request.dry_run) == ("balanced", False)
    overrides = request.overrides
    assert (overrides.bandwidth, overrides.max_downtime, overrides.timeout) == (1 << 20, 0.5, 60)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.BLOCKED, api.Blocked), (Outcome.FAILED, api.MigrationFailed),
        (Outcome.TIMED_OUT, api.MigrationFailed), (Outcome.LOST, api.OutcomeUnknown),
        (Outcome.UNKNOWN, api.OutcomeUnknown), (Outcome.POST_COPY_PAUSED, api.PostcopyPaused),
        (Outcome.CANCELLED, api.Cancelled),
    ],
)  # fmt: skip
async def test_a_migration_that_has_not_completed_is_an_error(
    client: Client, answers: Answers, outcome: Outcome, error: type[Exception]
) -> None:
    answers.answers["migrate"] = replace(REPORT, outcome=outcome)
    with pytest.raises(error, match="web1"):
        await client.migrate("web1", "beta")


@pytest.mark.parametrize("outcome", [Outcome.NOT_CONVERGED, Outcome.BLOCKED])
async def test_a_hint_refers_to_the_report_and_not_to_a_place_on_a_terminal(
    client: Client, answers: Answers, outcome: Outcome
) -> None:
    answers.answers["migrate"] = replace(REPORT, outcome=outcome, findings=())
    with pytest.raises(VmckptError) as told:
        await client.migrate("web1", "beta")
    assert "above" not in (told.value.hint or "")


async def test_a_migration_that_is_blocked_names_all_blockers(
    client: Client, answers: Answers
) -> None:
    found = (
        blocker("network-missing", "beta", "no bridge 'br0'", "create it"),
        blocker("memory-room", "beta", "1 GiB needed", None), *REPORT.findings,
    )  # fmt: skip
    answers.answers["migrate"] = replace(REPORT, outcome=Outcome.BLOCKED, findings=found)
    with pytest.raises(api.Blocked) as told:
        await client.migrate("web1", "beta")
    assert told.value.message.endswith("from alpha to beta: no bridge 'br0'; 1 GiB needed")
    assert told.value.hint == "create it"


async def test_wrong_arguments_are_refused_before_anything_is_asked(
    client: Client, answers: Answers
) -> None:
    calls: list[Coroutine[Any, Any, object]] = [
        client.migrate("web1", "beta", mode="teleport"),
        client.migrate("web1", "beta", bandwidth=1000),
        client.migrate("web1", "beta", max_downtime=2001.0),
        client.migrate("web1", "beta", policy="nothing"),
        client.failover("db1", planned=True, host_is_off=True),
    ]
    for call in calls:
        with pytest.raises(api.BadInput):
            await call
    with pytest.raises(api.InventoryError):
        Client("nowhere.yaml")
    assert answers.asked == []


async def test_an_evacuation_is_planned_and_carried_out(client: Client, answers: Answers) -> None:
    made = await client.plan_evacuation("alpha", to=["beta"])
    (move,) = made.moves
    assert (move.guest, move.target, made.remaining) == ("web1", "beta", ())
    assert (made.total.low, made.total.high) == (4.0, 9.0)
    done = await client.evacuate("alpha", why="new memory")
    assert [(one.guest, one.target) for one in done.moves] == [("web1", "beta")]
    assert (done.remaining, done.unprotected, done.job) == ((), (), "e-1")
    given, _ = answers.last("carry_out")
    assert given[1] == "new memory"


async def test_an_evacuation_with_blockers_does_not_begin(client: Client, answers: Answers) -> None:
    answers.answers["evacuation plan"] = planned(stays())
    answers.answers["carry_out"] = evacuated(stays())
    with pytest.raises(api.Blocked, match=r"not all guests of alpha .* db1: it uses a GPU"):
        await client.evacuate("alpha")
    assert "carry_out" not in [name for name, _, _ in answers.asked]
    done = await client.evacuate("alpha", partly=True)
    assert [(one.guest, one.hint) for one in done.remaining] == [("db1", "detach it")]


async def test_snapshots_are_taken_listed_and_restored(client: Client, answers: Answers) -> None:
    taken = await client.create_snapshot("web1", name="before-upgrade", memory=False)
    assert (taken.id, taken.paused_for, taken.warnings) == (TAKEN.id, 0.2, ("no guest agent",))
    (_, store, request), _ = answers.last("take")
    assert (store, request.guest, request.memory) == (None, "web1", False)

    good, bad = await client.snapshots("web1", store="near")
    assert (good.error, good.guest is not None, good.made_at is not None) == (None, True, True)
    assert (bad.id, bad.error, bad.guest, bad.memory) == ("s-2", "it is damaged", None, None)

    done = await client.restore_snapshot(taken.id, on="beta", fork="copy", replace=True)
    assert (done.guest, done.started) == ("web1", True)
    (_, _, order), more = answers.last("restore")
    assert (order.fork, order.end_running, more) == ("copy", True, {"on": "beta", "identity": None})


async def test_a_protection_from_its_start_to_its_end(client: Client, answers: Answers) -> None:
    done = await client.protect("db1", "beta", automatic=True, interval=0.1)
    assert (done.backup, done.job) == ("beta", "p-9abc")
    (_, request, _), _ = answers.last("protect")
    assert request.wishes == {"failover": Failover.AUTOMATIC, "interval": 0.1}
    (status,) = await client.status()
    assert (status.guest, status.ready, status.behind, status.ended) == ("safe", True, 0.11, None)
    assert (await client.failover("db1", host_is_off=True)).host == "beta"
    assert answers.last("failover")[1] == {"planned": False, "dead": True}
    assert (await client.unprotect("db1")).host == "beta"


async def test_a_protection_with_a_blocker_is_an_error(client: Client, answers: Answers) -> None:
    answers.answers["protect"] = replace(PROTECTED, findings=(BLOCKER,), status=None)
    with pytest.raises(api.Blocked, match="db1 cannot be protected by beta: no room; free some"):
        await client.protect("db1", "beta")


async def test_cancelling_stops_the_operation_and_waits_for_its_end(
    client: Client, answers: Answers
) -> None:
    ended: list[str] = []

    async def migrate(controller: Any, _: object) -> Any:
        await controller.caller.stop.wait()
        await asyncio.sleep(0.02)  # it makes sure where the guest runs
        ended.append("cancelled")
        raise Cancelled("cancelled; web1 is running on alpha")

    answers.answers["migrate"] = migrate
    task = asyncio.create_task(client.migrate("web1", "beta"))
    while "migrate" not in [name for name, _, _ in answers.asked]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]


async def test_an_error_of_a_service_is_passed_on(client: Client, answers: Answers) -> None:
    answers.answers["take"] = api.GuestLocked("web1 is locked by m-1", hint="wait")
    with pytest.raises(api.GuestLocked, match="web1 is locked by m-1; wait") as caught:
        await client.create_snapshot("web1")
    assert caught.value.exit_code == 18


async def test_warnings_go_to_the_log_or_to_a_function(
    client: Client, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    async def migrate(controller: Any, _: object) -> Any:
        controller.caller.warn("beta is slow")
        return REPORT

    answers.answers["migrate"] = migrate
    with caplog.at_level(logging.WARNING, "vmckpt.api"):
        await client.migrate("web1", "beta")
    assert caplog.messages == ["beta is slow"]
    told: list[str] = []
    await Client("hosts.yaml", warn=told.append).migrate("web1", "beta")
    assert told == ["beta is slow"]
