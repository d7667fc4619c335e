"""What is true of snapshots, restores and guards that nobody attends."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.following import take
from tests.support.interrupted_restores import FakeMonitor, order, swap
from vmckpt import inventory, recovery
from vmckpt.agent import client
from vmckpt.agent.orders import UnrestoreOrder
from vmckpt.agent.restore import undo_restore
from vmckpt.agent.restore.leftovers import LeftoverDecision
from vmckpt.cli import app
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller
from vmckpt.model.migration import Outcome
from vmckpt.snapshot.recovery import came_back, came_in, fork_verdict, guard_verdict
from vmckpt.snapshot.request import Step

__all__ = ["order"]


def test_a_guard_without_a_controller_says_the_way_back() -> None:
    told = guard_verdict(("s-x", "near"))
    assert (told.outcome, "restore s-x --store near --replace" in told.did[0]) == (
        Outcome.FAILED, True,
    )  # fmt: skip
    assert guard_verdict(None).did == ()


@pytest.mark.parametrize(
    ("hook", "ran", "truth"),
    [
        (None, False, "the guest was restored"),
        ("x", False, "the guest was restored; its on_restore hook was not run: x"),
        ("x", True, "the guest was restored; its on_restore hook may not have finished: x"),
    ],
)
def test_recovery_says_what_became_of_the_hook(hook: str | None, ran: bool, truth: str) -> None:
    assert came_back(LeftoverDecision.ARRIVED, hook=hook, ran=ran).truth == truth


def test_forks_without_a_controller_are_kept_if_they_run() -> None:
    told = fork_verdict("fam-1", 3, 16)
    assert (told.truth, told.outcome) == ("3 of 16 forks are running", Outcome.COMPLETED)
    assert "run vmckpt fork drop --family fam-1" in told.did[0]
    assert fork_verdict("fam-1", 0, 16).outcome is Outcome.FAILED


@pytest.mark.parametrize(("begun", "outcome"), [(True, "completed"), (False, "failed")])
async def test_the_host_is_asked_for_the_forks_of_an_orphaned_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, outcome: str
) -> None:
    family = {"family": "fam-1", "template": "web1", "snapshot": "s-1", "store": "near"}
    child = {"guest": "u-1", "name": "a", "runs": True, "memory_bytes": 0, "disk_bytes": 0}

    async def run_order(_: object, order: Mapping[str, Any], *__: object) -> dict[str, Any]:
        assert order["do"] == "families"
        return {"families": [{**family, "children": [child]}]}

    monkeypatch.setattr(client, "run_order", run_order)
    (tmp_path / "hosts.yaml").write_text("hosts: {alpha: {uri: 'test:///default'}}\n")
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    gone = replace(controller_identity.this_process(), started=1)
    with Journal() as journal:
        new = NewOperation(kind="fork", guest="web1", source="alpha")
        id_ = journal.begin(new, controller=gone)
        if begun:
            intent = {**family, "guests": ["u-1", "u-2"]}
            journal.intend(id_, Step.FORK, intent, None, by=gone)
        known = inventory.load(tmp_path / "hosts.yaml")
        caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())
        await recovery.recover_job(known, (), caller, id_)
        assert journal.operation(id_).outcome == outcome


def test_a_lazy_restore_is_watched_until_its_disks_are_whole() -> None:
    told = came_back(LeftoverDecision.ARRIVED)
    assert came_in(told, waits=False, whole=True) == told
    assert came_in(told, waits=True, whole=False).goes_on
    assert came_in(told, waits=True, whole=True).outcome is Outcome.COMPLETED


def test_recovery_closes_only_what_is_known() -> None:
    unclear = came_back(LeftoverDecision.UNCLEAR, why="x", left=["/s/vda.old"])
    assert (unclear.outcome, "/s/vda.old" in unclear.settle) == (None, True)
    assert came_back(LeftoverDecision.BACK, did=["y"]).did == ("y",)
    assert came_back(LeftoverDecision.BACK).outcome is Outcome.FAILED
    assert (
        came_back(LeftoverDecision.ARRIVED, memory=False).truth == "the guest's disks were restored"
    )


def test_whoever_recovers_one_of_a_group_is_told_that_it_may_stand() -> None:
    told = came_back(LeftoverDecision.ARRIVED, stands=True)
    assert "may be paused; run virsh resume GUEST when all guests of its group" in told.truth
    assert "paused" not in came_back(LeftoverDecision.ARRIVED).truth


@pytest.fixture
def interrupted(
    order: UnrestoreOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> UnrestoreOrder:
    """A restore, in a journal, whose controller and agent died while images were swapped in."""
    (tmp_path / "hosts.yaml").write_text("hosts: {alpha: {uri: 'test:///default'}}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    begun = {"snapshot": order.snapshot, "state": order.state, "images": dict(order.images)}
    gone = replace(controller_identity.this_process(), started=1)
    with Journal() as journal:
        new = NewOperation(kind="restore", guest="web1", guest_uuid="u", source="alpha")
        id_ = journal.begin(new, controller=gone)
        for name, intent in (
            (Step.RESTORE, begun), (Step.MAKE_WAY, {"made": dict(order.made or {}), "empty": []}),
        ):  # fmt: skip
            journal.intend(id_, name, intent, None, by=gone)

    async def carried_out(_: object, told: Mapping[str, Any], *__: object) -> dict[str, Any]:
        fields = {name: value for name, value in told.items() if name != "do"}
        return undo_restore.unrestore(UnrestoreOrder.from_json(fields))

    monkeypatch.setattr(client, "run_order", carried_out)
    monkeypatch.setattr(FakeMonitor, "state", "running")
    return order


def aside(order: UnrestoreOrder) -> None:
    """Move all images away that are not those of the guest."""
    for path in Path(order.images["vda"]).parent.glob("vd?.*"):
        path.unlink()


@pytest.mark.parametrize("names", [("vda", "vdb"), ("vda",)], ids=["booted", "mixed"])
def test_a_restore_that_is_not_clear_is_settled_once_the_images_were_checked(
    interrupted: UnrestoreOrder, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    swap(interrupted, *names)
    assert app.run(["recover"]) == 13
    told = capsys.readouterr().out
    job = told.split()[0]
    again, forget = take(told, JOB=job)
    aside(interrupted)
    settled = app.run(list(again.words[1:])) == 0
    assert settled == (names == ("vda", "vdb"))
    if not settled:
        assert app.run(list(forget.words[1:])) == 0
    capsys.readouterr()
    assert app.run(["jobs", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
