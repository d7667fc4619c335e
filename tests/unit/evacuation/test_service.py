"""An evacuation that is gone on with keeps to the policy that it was ordered by."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tui.still import operation
from vmckpt.evacuation import service
from vmckpt.evacuation.task import Kind, Task
from vmckpt.model.events import Caller
from vmckpt.model.migration import Outcome
from vmckpt.policy import loader

OWN = "version: vmckpt/v1\nname: {name}\nevacuate: {{tries: 9}}\n"


def in_force(**told: Any) -> dict[str, int]:
    """Names of policies, and how often each tries."""
    one = operation("e-1", "evacuate", policy="nightly", **told)
    found = service.in_force(one, loader.load_all(None))
    return {policy.name: policy.evacuation.tries for policy in found}


def test_the_policy_of_a_file_is_known_though_nobody_names_the_file_again(tmp_path: Path) -> None:
    shipped = in_force()
    path = tmp_path / "nightly.yaml"
    path.write_text(OWN.format(name="nightly"))
    text = loader.text_of(loader.load_file(path))
    assert in_force(detail={"policy": text}) == shipped | {"nightly": 9}
    # One of the same name that was changed or is another one does not count.
    text = OWN.format(name="maintenance")
    assert in_force(detail={"policy": text}) == shipped | {"maintenance": 9}


def test_what_cannot_be_read_or_is_not_there_changes_nothing(tmp_path: Path) -> None:
    assert in_force(detail={"policy": None}) == in_force(detail={"policy": "?: ["}) == in_force()
    path = tmp_path / "nightly.yaml"
    path.write_text(OWN.format(name="nightly"))
    policy = loader.load_file(path)
    path.unlink()
    assert loader.text_of(policy) is None


@pytest.mark.parametrize("phase", ["", "paused", "stopping"])
async def test_what_was_told_to_begin_nothing_new_begins_nothing_new(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    stopped = []

    async def carry_out(orders: Any, *_: object) -> Any:
        stopped.append(orders.caller.stop.is_set())
        ended = SimpleNamespace(left=(), arrived=(), stopped=bool(phase))
        return SimpleNamespace(ended=ended, bare=(), arrived=(), outcome=Outcome.CANCELLED)

    monkeypatch.setattr(service, "carry_out", carry_out)
    task = Task(kind=Kind.EVACUATE, host="alpha").as_json()
    caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())
    inventory: Any = SimpleNamespace(hosts={})
    case: Any = SimpleNamespace(
        operation=operation("e-1", "evacuate", phase=phase, detail={"task": task}),
        recorder=object(), adopt=True, caller=caller, inventory=inventory,
    )  # fmt: skip
    resolve: Any = None
    told = await service.settle(case, (), resolve)
    assert stopped == [bool(phase)]
    assert not caller.stop.is_set()  # whoever recovers goes on with the next one
    assert (f"was {phase} when its controller died" in told.truth) == bool(phase)
