"""A host's maintenance is as it was if nothing was begun."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.app.controller import Controller
from vmckpt.app.evacuation import Emptying
from vmckpt.errors import Blocked, Cancelled, GuestLocked, VmckptError
from vmckpt.evacuation import service
from vmckpt.evacuation.task import Kind, Task
from vmckpt.inventory import Inventory
from vmckpt.journal import maintenance
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.policy import loader

ALPHA = Host(name="alpha", uri="test:///default")


async def refused(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, error: VmckptError | None
) -> dict[str, str]:
    """What is in maintenance after that, and why."""

    async def begin(*_: object) -> object:
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr(service, "begin", begin)
    nowhere = Inventory(path=Path("hosts.yaml"), hosts={"alpha": ALPHA}, observer=None)
    caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())
    task = Task(kind=kind, host="alpha")
    acting = Controller(inventory=nowhere, policies=loader.load_all(None), caller=caller)
    emptying = Emptying(acting, task)
    plan: Any = SimpleNamespace(task=task)
    try:
        await emptying.carry_out(plan, "new memory", asyncio.Event())
    except VmckptError as exc:
        assert exc is error  # noqa: PT017 – of those that it did not raise nothing is asked
    return {name: one.why for name, one in maintenance.held().items()}


NOT_BEGUN = [GuestLocked("a job has it"), Blocked("it is silent"), Cancelled("Ctrl-C")]


@pytest.mark.parametrize("error", NOT_BEGUN)
async def test_what_was_not_begun_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: VmckptError
) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    assert await refused(monkeypatch, Kind.EVACUATE, error) == {}
    assert await refused(monkeypatch, Kind.REPOPULATE, error) == {}
    maintenance.enter("alpha", "the owner's words")
    assert await refused(monkeypatch, Kind.EVACUATE, error) == {"alpha": "the owner's words"}
    assert await refused(monkeypatch, Kind.REPOPULATE, error) == {"alpha": "the owner's words"}


async def test_what_was_begun_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    assert await refused(monkeypatch, Kind.EVACUATE, None) == {"alpha": "new memory"}
    assert await refused(monkeypatch, Kind.REPOPULATE, None) == {}
    lost = VmckptError("somebody else goes on with it")
    assert await refused(monkeypatch, Kind.EVACUATE, lost) == {"alpha": "new memory"}
