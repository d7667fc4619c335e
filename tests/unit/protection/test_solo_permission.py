"""Leave to go on without a standby, in a real journal: noted first, and for whoever comes next."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vmckpt.errors import RemoteError
from vmckpt.inventory import Inventory
from vmckpt.journal import recorder
from vmckpt.journal.recorder import OrphanedJob, Recorder
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.protection import agent_client, recovery, solo_permission
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.steps import Step

ALPHA = Host(name="alpha", uri="qemu+tcp://alpha/system")
BETA = Host(name="beta", uri="qemu+tcp://beta/system")
AWAY = {"error": "beta: no answer", "unreachable": True}
WANTS = {"role": "primary", "agent": True, "runs": True, "phase": "protecting", "wants_leave": "17"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "journal.db"
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    return found


@pytest.fixture
def kept(place: Path) -> Iterator[Recorder]:
    new = NewOperation(
        kind="protect", guest="web1", guest_uuid="u-1", source="alpha", target="beta",
        detail={"judge": "watch"},
    )  # fmt: skip
    with recorder.begin(new, print, place=place) as made:
        made.acquire("guest/u-1")
        made.intend(Step.PROTECT, {"session": "5e55", "lease": False})
        yield made


def job(kept: Recorder) -> str:
    assert kept.id is not None
    return kept.id


async def test_it_is_noted_once_and_is_over_when_the_standby_is_whole(kept: Recorder) -> None:
    assert await solo_permission.alone(job(kept)) == ()
    await solo_permission.note(kept, job(kept), "beta was away")
    (first,) = await solo_permission.alone(job(kept))
    await solo_permission.note(kept, job(kept), "beta was away again")
    assert await solo_permission.alone(job(kept)) == (first,)
    await solo_permission.close(kept, job(kept))
    assert await solo_permission.alone(job(kept)) == ()
    await solo_permission.note(kept, job(kept), "beta was away a third time")
    (third,) = await solo_permission.alone(job(kept))
    assert third != first


class Agents:
    """Alpha's wants leave; beta's is away."""

    def __init__(self, kept: Recorder, place: Path) -> None:
        self.kept, self.place = kept, place
        self.deaf = False
        self.given: list[str] = []

    async def ask(self, host: Host, guest: str, **more: Any) -> ProtectionStatus:
        assert (host, guest) == (ALPHA, "u-1")
        with Journal(self.place) as journal:  # by then the journal has it
            steps = journal.steps(job(self.kept))
        noted = [one.state for one in steps if one.name == Step.ALONE]
        assert noted == [StepState.INTENDED]
        if self.deaf:
            raise RemoteError("alpha: no answer")
        self.given.append(f"{more['wish']} {more['leave']}")
        return parse_answer({})

    async def status(self, host: Host, _: str) -> ProtectionStatus:
        return parse_answer({"alpha": WANTS, "beta": AWAY}[host.name])


@pytest.fixture
def agents(kept: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch) -> Agents:
    made = Agents(kept, place)
    monkeypatch.setattr(agent_client, "request", made.ask)
    monkeypatch.setattr(agent_client, "status", made.status)
    return made


async def test_recover_gives_it_where_nobody_keeps_watch(
    kept: Recorder, place: Path, agents: Agents
) -> None:
    with Journal(place) as journal:
        operation, steps = journal.operation(job(kept)), journal.steps(job(kept))
    inventory = SimpleNamespace(host=lambda name: {"alpha": ALPHA, "beta": BETA}[name], lease=None)
    caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())

    def case(recorder: Recorder | None) -> OrphanedJob:
        return OrphanedJob(
            inventory=cast("Inventory", inventory), operation=operation, steps=steps,
            recorder=recorder, caller=caller, adopt=False,
        )  # fmt: skip

    told = await recovery.settle(case(None), ())
    assert (told.goes_on, told.settle) == (
        True,
        "run vmckpt recover to permit the guest to run unprotected",
    )
    assert agents.given == []
    agents.deaf = True
    with pytest.raises(RemoteError):
        await recovery.settle(case(kept), ())
    # It may have heard: nobody lets the standby run.
    assert len(await solo_permission.alone(job(kept))) == 1
    agents.deaf = False
    found = await recovery.settle(case(kept), ())
    assert agents.given == ["alone 17"]
    assert (found.outcome, found.goes_on) == (None, True)
    assert found.truth == (
        "beta is unreachable; web1, whose output was waiting for it, now runs unprotected"
    )
