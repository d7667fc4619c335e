"""A guest's part in a cut: when it holds its output, whom it waits for, and that it lets go."""

import json
import queue
from collections.abc import Iterator
from typing import IO, Any, cast

import pytest

from tests.support.held_output import Qemu, card
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.snapshot.create import GroupMember
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import CaptureFailed, VmckptError
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.recovery import Phase

FACTS = Undo(guest="u", capabilities={}, bandwidth=1, runs=True, folder="")


class Controller:
    """Answers what the agent asks, and says how QEMU was when it was asked."""

    def __init__(self, qemu: Qemu, refuses: Phase | None = None) -> None:
        self.asked: list[tuple[str, bool]] = []
        self._qemu, self._refuses = qemu, refuses
        self._lines: queue.Queue[str] = queue.Queue()

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines.get, "")

    def readline(self) -> str:
        return '{"do": "create"}\n'

    def write(self, text: str) -> None:
        told = json.loads(text)
        about: dict[str, Any] = told["about"]
        self.asked.append((str(about.get("phase") or about["step"]), bool(self._qemu.filters)))
        no = self._refuses is not None and about.get("phase") == self._refuses
        answer = {"refused": "b was late"} if no else {"answer": True}
        self._lines.put(json.dumps(answer) + "\n")

    def flush(self) -> None:
        pass


def opened(controller: Controller) -> ControllerChannel:
    both_ends = cast("IO[str]", controller)
    channel = ControllerChannel(both_ends, both_ends)
    channel.order()
    return channel


def member(qemu: Qemu, controller: Controller) -> GroupMember:
    return GroupMember(cast("QmpMonitor", qemu), opened(controller))


def run(cut: GroupMember, done: list[str]) -> None:
    """As a capture calls its hooks."""
    hooks = cut.hooks(
        Hooks(
            note=lambda _: done.append("note"),
            barrier=lambda: done.append("barrier"),
            captured=lambda: done.append("captured"),
        )
    )
    assert hooks.barrier is not None
    try:
        hooks.note(FACTS)
        hooks.ready()
        hooks.barrier()
        hooks.captured()
    except BaseException:
        hooks.given_up()
        raise


def test_output_is_held_while_the_others_are_waited_for() -> None:
    qemu, done = Qemu(card()), list[str]()
    controller = Controller(qemu)
    with member(qemu, controller) as cut:
        run(cut, done)
        assert qemu.filters == {}
        assert cut.held >= 0
    assert controller.asked == [
        ("hold", False), ("ready", False), ("stopped", True), ("captured", True)
    ]  # fmt: skip
    assert done == ["note", "barrier", "captured"]


@pytest.mark.parametrize(
    ("phase", "done"),
    [
        (Phase.READY, ["note"]),
        (Phase.STOPPED, ["note"]),
        (Phase.CAPTURED, ["note", "barrier", "captured"]),
    ],
)
def test_a_no_lets_everything_go_at_once(phase: Phase, done: list[str]) -> None:
    qemu, came = Qemu(card()), list[str]()
    with member(qemu, Controller(qemu, phase)) as cut:
        with pytest.raises(VmckptError, match="b was late"):
            run(cut, came)
        assert qemu.filters == {}
    assert came == done


def test_another_way_may_be_tried_only_before_the_guest_stood_still() -> None:
    qemu = Qemu(card())
    controller = Controller(qemu)
    with member(qemu, controller) as cut:
        hooks = cut.hooks(Hooks(note=lambda _: None))
        hooks.note(FACTS)
        hooks.ready()
        hooks.note(FACTS)  # the first way did not work
        hooks.ready()
        assert [one for one, _ in controller.asked] == ["hold", "ready"]
        assert hooks.barrier is not None
        hooks.barrier()
        with pytest.raises(CaptureFailed, match="other guests of the group had been"):
            hooks.note(FACTS)
    assert qemu.filters == {}
