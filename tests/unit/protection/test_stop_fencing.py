"""Fencing as a protection does it: with a journal that says so, and knows no secret."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.fence_agents import SECRET, FakeAgent, host
from tests.support.following import take
from vmckpt.cli.app import app
from vmckpt.doctor import gather
from vmckpt.doctor.checks import DeviceSeen
from vmckpt.errors import FencingFailed, JournalError, LeaseLost
from vmckpt.journal import recorder
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation, StepState, StoredStep
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller
from vmckpt.model.fencing import Power
from vmckpt.model.host import Host
from vmckpt.protection import stop
from vmckpt.protection.steps import Step
from vmckpt.remote import fence_agent as agents


@dataclass
class Scene:
    """A protection's journal, and an agent."""

    place: Path
    agent: FakeAgent
    recorder: Recorder
    warned: list[str] = field(default_factory=list)

    @property
    def caller(self) -> Caller:
        return Caller(emit=lambda _: None, warn=self.warned.append, stop=asyncio.Event())

    def steps(self) -> list[StoredStep]:
        assert self.recorder.id is not None
        with Journal(self.place) as journal:
            return list(journal.steps(self.recorder.id))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(agents, "_TURN", 0.01)
    place = tmp_path / "state" / "journal.db"
    new = NewOperation(kind="protect", guest="web1", guest_uuid="u-1", source="alpha")
    with recorder.begin(new, print, place=place) as kept:
        kept.acquire("guest/u-1")
        yield Scene(place, FakeAgent(tmp_path / "agent"), kept)


async def test_the_journal_says_who_was_fenced_when_and_by_whom(scene: Scene) -> None:
    done = await stop.fence_host(scene.agent.host(), scene.recorder, scene.caller)
    (step,) = scene.steps()
    path = str(scene.agent.path)
    assert (step.name, step.state) == (Step.FENCE, StepState.DONE)
    assert step.intent == {"host": "alpha", "agent": path, "action": "off"}
    assert step.result == done.as_json()
    assert done.as_json()["answered"] == "off"
    assert scene.warned == [
        f"fencing alpha: powering it and all its guests off with {path}",
        f"{path} reports that alpha is off",
    ]


async def test_what_was_tried_in_vain_is_kept_with_what_was_answered(scene: Scene) -> None:
    scene.agent.behaves(off="tells")
    with pytest.raises(FencingFailed, match="add --host-is-off"):
        await stop.fence_host(scene.agent.host(), scene.recorder, scene.caller)
    (step,) = scene.steps()
    assert step.state is StepState.FAILED
    assert step.result is not None
    told = step.result["error"]
    assert "could not be switched off: the fence agent exited with 1: Unable to" in told
    scene.agent.behaves()
    await stop.fence_host(scene.agent.host(), scene.recorder, scene.caller)
    assert [one.state for one in scene.steps()] == [StepState.FAILED, StepState.DONE]


@pytest.mark.parametrize("mode", ["works", "tells"])
async def test_no_secret_is_written_down(scene: Scene, tmp_path: Path, mode: str) -> None:
    scene.agent.behaves(off=mode)
    file = tmp_path / "password"
    file.write_text("correct-horse\n")
    file.chmod(0o644)
    fenced = scene.agent.host({"ip": "10.9.0.11", "snmp": SECRET}, password_file=file)
    try:
        await stop.fence_host(fenced, scene.recorder, scene.caller)
    except FencingFailed as exc:
        scene.warned.append(str(exc))
    scene.recorder.close()
    readable = f"{file}: other users can read the password in it; run chmod 600 {file}"
    assert scene.warned[0] == readable
    told = "\n".join(scene.warned).encode()
    kept = b"".join(one.read_bytes() for one in scene.place.parent.iterdir())
    for secret in (b"correct-horse", SECRET.split()[0].encode(), b"so=on", b"10.9.0.11"):
        assert secret not in told
        assert secret not in kept


async def test_a_password_that_others_can_read_is_closed_by_the_command(
    scene: Scene, tmp_path: Path
) -> None:
    file = tmp_path / "password of alpha"
    file.write_text("correct-horse\n")
    file.chmod(0o644)
    fenced = scene.agent.host(password_file=file)
    await stop.fence_host(fenced, scene.recorder, scene.caller)
    (command,) = take(scene.warned[0])
    assert await (await asyncio.create_subprocess_exec(*command.words)).wait() == 0
    scene.warned.clear()
    await stop.fence_host(fenced, scene.recorder, scene.caller)
    assert not any("other users" in line for line in scene.warned), scene.warned


async def test_a_journal_that_was_lost_to_another_keeps_the_host_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> int:
        raise LeaseLost("another controller has taken over")

    monkeypatch.setattr(scene.recorder, "intend", lost)
    with pytest.raises(LeaseLost):
        await stop.fence_host(scene.agent.host(), scene.recorder, scene.caller)
    assert scene.agent.calls == []


async def test_a_journal_that_breaks_afterwards_does_not_keep_the_guest_off(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise JournalError("no room")

    monkeypatch.setattr(scene.recorder, "conclude", broken)
    assert (await stop.fence_host(scene.agent.host(), scene.recorder, scene.caller)).host == "alpha"


async def test_doctor_asks_the_agent_and_switches_nothing_off(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path / "agent")
    (seen,) = await asked(agent.host())
    assert seen.ran is not None
    assert (seen.ran.status, seen.error) == (0, None)
    agent.behaves(status="tells")
    (seen,) = await asked(agent.host())
    assert "hunter2" not in repr(seen)
    (missing,) = await asked(agent.host(agent="fence_nowhere"))
    assert "fence agent fence_nowhere is not installed" in str(missing.error)
    assert (agent.power, set(agent.actions)) == ("on", {"status"})


async def test_doctor_asks_all_devices(tmp_path: Path) -> None:
    agents = [FakeAgent(tmp_path / str(number)) for number in range(3)]
    agents[1].behaves(status=1)
    one, two, three = (agent.device() for agent in agents)
    seen = await asked(host((one,), (two, three)))
    assert [(device.power, device.level) for device in seen] == [
        (Power.ON, 0), (Power.UNKNOWN, 1), (Power.ON, 1),
    ]  # fmt: skip
    assert seen[2].name == f"{agents[2].path} (level 2, device 2 of 2)"


async def asked(host: Host) -> tuple[DeviceSeen, ...]:
    seen = await gather._fence(host)
    assert seen is not None
    return seen.devices


@pytest.mark.parametrize(
    "words",
    [("--planned", "--fence"), ("--host-is-off", "--fence"), ("--planned", "--host-is-off")],
)
def test_what_excludes_each_other_is_refused_before_anything_is_asked(
    words: tuple[str, ...],
) -> None:
    result = CliRunner().invoke(app, ["failover", "web1", *words, "--inventory", "/nowhere"])
    assert "mutually exclusive" in str(result.exception)
