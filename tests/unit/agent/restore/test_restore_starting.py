"""A guest that is started from memory, and an answer that never comes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import pytest

from tests.support.restore_orders import order as an_order
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.restore import restore as restore_restore
from vmckpt.agent.restore.restore import Revival
from vmckpt.errors import Cancelled, HypervisorError, OutcomeUnknown, VmckptError
from vmckpt.hypervisor import connection, qmp
from vmckpt.units import Seconds


class Guest:
    """libvirt's word for it, one answer after the other, the last for ever."""

    answers: ClassVar[list[str | None]] = []
    did: ClassVar[list[str]] = []

    def __init__(self, guest: str, *, host: str, uri: str) -> None:
        told = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if told is None:
            raise HypervisorError("no guest", host=host, code=connection.NOT_HERE[0])
        if told == "broken":
            raise HypervisorError("no connection", host=host)
        self.state = told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run_state(self) -> str:
        return self.state

    def cards(self) -> list[str]:
        return ["net0"]

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        self.did.append(command)

    def resume(self) -> None:
        self.did.append("resume")

    def end(self) -> None:
        self.did.append("end")


class Memory:
    """A revival that gets as far as it is let."""

    trouble: Exception | None = None
    xml = "<domain/>"

    def fill(self, file: int) -> None:
        os.write(file, b"x")


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RestoreOrder:
    monkeypatch.setattr(restore_restore, "QmpMonitor", Guest)
    monkeypatch.setattr(restore_restore, "_PATIENCE", Seconds(0.2))
    monkeypatch.setattr(restore_restore, "_TURN", Seconds(0.01))
    monkeypatch.setattr(Guest, "did", [])
    found = replace(an_order(tmp_path), state=str(tmp_path), host="alpha")
    found.folder.mkdir(parents=True)
    return found


def begin(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, error: VmckptError | None,
    answers: list[str | None], memory: Memory | None = None,
) -> None:  # fmt: skip
    def restore(*_: object, **__: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(qmp, "restore", restore)
    monkeypatch.setattr(Guest, "answers", list(answers))
    restore_restore.start(order, cast("Revival", memory or Memory()))


NO_ANSWER = OutcomeUnknown("alpha: the connection broke", host="alpha")
NO = HypervisorError("alpha: no", host="alpha")


@pytest.mark.parametrize(
    "answers", [["running"], ["broken", "running"], ["inmigrate", "inmigrate", "paused"]]
)
def test_without_an_answer_a_guest_that_is_there_was_started(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, answers: list[str | None]
) -> None:
    begin(order, monkeypatch, NO_ANSWER, answers)


@pytest.mark.parametrize("answers", [[None], ["broken", None], ["inmigrate", "internal-error"]])
def test_without_an_answer_only_a_clear_no_is_one(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, answers: list[str | None]
) -> None:
    with pytest.raises(HypervisorError, match="was not started") as caught:
        begin(order, monkeypatch, NO_ANSWER, answers)
    assert not isinstance(caught.value, OutcomeUnknown)


@pytest.mark.parametrize("answer", ["broken", "inmigrate"])
def test_what_nobody_knows_stays_open_for_recovery(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    with pytest.raises(OutcomeUnknown, match="all images stay in place") as caught:
        begin(order, monkeypatch, NO_ANSWER, [answer])
    assert not caught.value.undone


def test_what_broke_the_memory_off_is_told_and_not_libvirts_word(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    memory.trouble = Cancelled("stopped")
    with pytest.raises(Cancelled):
        begin(order, monkeypatch, NO, [None], memory)


def test_a_fork_is_resumed_once_it_is_hushed(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(replace(order, links_down=True), monkeypatch, None, ["paused"])
    assert Guest.did == ["set_link", "resume"]


@pytest.mark.parametrize(
    ("answers", "error", "did"),
    [
        (["broken", "broken", "paused"], HypervisorError, ["end"]),
        (["broken", None], HypervisorError, []),
        (["broken"], OutcomeUnknown, []),
    ],
)
def test_a_fork_that_cannot_be_hushed_is_ended_before_its_images_go(
    order: RestoreOrder, monkeypatch: pytest.MonkeyPatch, answers: list[str | None],
    error: type[VmckptError], did: list[str],
) -> None:  # fmt: skip
    with pytest.raises(error) as caught:
        begin(replace(order, links_down=True), monkeypatch, None, answers)
    assert (type(caught.value), Guest.did) == (error, did)
