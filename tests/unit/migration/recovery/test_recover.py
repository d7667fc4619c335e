"""What the journal has of a migration that nobody attends, and what it is held to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import HOST
from tests.support.engine_runs import ORDER
from tests.support.policies import named
from tests.support.stored_operations import OPERATION, step
from vmckpt.errors import BadInput, InventoryError
from vmckpt.hypervisor import domains, same_host
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.journal.records import StepState, StoredStep
from vmckpt.migration.recovery import decide, recover
from vmckpt.migration.recovery.decide import RecoveryAction
from vmckpt.migration.recovery.recover import OpenSteps, Recovery
from vmckpt.migration.recovery.steps import Step
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.migration import Driver, Mode, Outcome
from vmckpt.model.same_host import SameUuid

HOSTS = {name: replace(HOST, name=name) for name in ("alpha", "beta", "gamma")}
INVENTORY = Inventory(path=Path("hosts.yaml"), hosts=HOSTS, observer=None)
POLICIES = (named("balanced"), named("mine"))


def left(*steps: StoredStep, **changes: Any) -> OpenSteps:
    return recover.open_steps(replace(OPERATION, **changes), steps)


def recovery(*steps: StoredStep, **changes: Any) -> Recovery:
    setting = recover.setting_of(OPERATION, INVENTORY, POLICIES)
    return Recovery(setting, left(*steps, **changes))


def test_only_what_was_neither_finished_nor_undone_is_open() -> None:
    first, last = step(Step.BANDWIDTH, n=1), step(Step.BANDWIDTH, n=2)
    found = left(first, last, step(Step.PAUSE, StepState.UNDONE), step(Step.MOVE, StepState.DONE))

    assert found.steps == (first, last)
    assert found.open(Step.BANDWIDTH) is last
    assert found.open(Step.PAUSE) is None
    assert found.open(Step.MOVE) is None


def test_the_order_is_the_one_that_was_given_last() -> None:
    move = step(Step.MOVE, order=ORDER.as_json())
    told = left(move).order

    assert told == ORDER
    assert left().order is None
    assert left(move, step(Step.DRIVER)).order == replace(ORDER, driver=Driver.CLIENT)
    assert left(detail={"order": ORDER.as_json()}).order == ORDER


def test_an_order_that_makes_no_sense_is_for_a_person() -> None:
    with pytest.raises(BadInput, match="m-1: the order in the journal is invalid"):
        _ = left(step(Step.MOVE, order={"driver": "a horse"})).order


def test_it_goes_on_under_the_policy_and_the_wishes_that_it_was_begun_with() -> None:
    text = "version: vmckpt/v1\nname: mine\nlimits: {max_downtime: 700ms}\n"
    begun = recovery(step(Step.MOVE, policy=text), detail={"wishes": {"timeout": 60}})

    assert begun.policy.limits.max_downtime == pytest.approx(0.7)
    assert begun.policy.limits.time == pytest.approx(60)
    assert recovery().policy == POLICIES[1]
    assert recovery(policy="gone").policy == POLICIES[0]
    assert recovery(step(Step.MOVE, policy="[")).policy == POLICIES[1]
    assert (begun.mode, recovery(mode=None).mode) == (Mode.HYBRID, Mode.PRECOPY)


def test_it_takes_place_where_it_was_begun_and_all_other_hosts_are_asked_too() -> None:
    setting = recover.setting_of(OPERATION, INVENTORY, ())

    assert (setting.source, setting.target) == (HOSTS["alpha"], HOSTS["beta"])
    assert setting.others == [HOSTS["gamma"]]
    with pytest.raises(InventoryError):
        recover.setting_of(replace(OPERATION, target="gone"), INVENTORY, ())


def test_a_decision_is_told_as_it_would_be_carried_out() -> None:
    never = recover.settled(decide.NEVER)
    adopts = recover.settled(replace(decide.NEVER, outcome=None, acts=(RecoveryAction.ADOPT,)))

    assert (never.outcome, never.goes_on) == (Outcome.FAILED, False)
    assert never.did == ("undo the preparations for the move",)
    assert (adopts.outcome, adopts.goes_on) == (None, True)


@pytest.mark.looptime
async def test_of_what_had_not_begun_no_host_is_asked() -> None:
    assert await recovery().decide() is decide.NEVER
    assert await recovery(step(Step.IMAGES), guest_uuid=None).decide() is decide.NEVER


RUNS = Presence(reachable=True, state=GuestState.RUNNING)
HELD = Presence(reachable=True, state=GuestState.PAUSED, held=True)
GONE = Presence(reachable=True)


def found(
    monkeypatch: pytest.MonkeyPatch, there: Mapping[str, Presence], *same: SameUuid
) -> list[tuple[str, ...]]:
    """The hosts have the guest like that; the pairs of hosts that are compared."""
    compared: list[tuple[str, ...]] = []

    async def presence(host: Hypervisor, _: str) -> Presence:
        return there.get(host.host.name, GONE)

    async def among(hosts: Sequence[Hypervisor]) -> tuple[SameUuid, ...]:
        names = tuple(one.host.name for one in hosts)
        compared.append(names)
        return tuple(one for one in same if {one.first, one.second} == {*names})

    monkeypatch.setattr(domains, "presence", presence)
    monkeypatch.setattr(same_host, "among", among)
    monkeypatch.setattr(recover, "PATIENCE", 0.0)
    monkeypatch.setattr(recover, "_AGAIN", 0.0)
    return compared


def pair(first: str, second: str, *, one: bool | None) -> SameUuid:
    return SameUuid(first=first, second=second, one=one, why="x")


MOVE = step(Step.MOVE, order=ORDER.as_json())


async def test_another_name_of_the_source_is_not_another_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hint was to destroy "the others", and there was one."""
    there = {"alpha": RUNS, "gamma": RUNS}
    found(monkeypatch, there, pair("alpha", "gamma", one=True))
    verdict = await recovery(MOVE).decide()
    assert verdict.outcome is Outcome.FAILED
    assert "destroy" not in verdict.settle

    compared = found(monkeypatch, there)
    verdict = await recovery(MOVE).decide()
    assert verdict.truth == "there is also a copy of the guest on gamma"
    assert ("alpha", "gamma") in compared
    assert ("beta", "gamma") not in compared

    found(monkeypatch, there, pair("alpha", "gamma", one=None))
    with pytest.raises(InventoryError, match="it is unknown whether alpha and gamma are one host"):
        await recovery(MOVE).decide()


@pytest.mark.parametrize("state", [RUNS, HELD])
async def test_no_copy_is_destroyed_before_there_are_two(
    monkeypatch: pytest.MonkeyPatch, state: Presence
) -> None:
    """hosts.yaml was changed since, and both names are one host: the copy there is the only one."""
    both = {"alpha": state, "beta": state}
    for one in (True, None):
        found(monkeypatch, both, pair("alpha", "beta", one=one))
        with pytest.raises(InventoryError, match="alpha and beta are one host"):
            await recovery(MOVE).decide()
    compared = found(monkeypatch, both)
    await recovery(MOVE).decide()
    assert compared == [("alpha", "beta")]
