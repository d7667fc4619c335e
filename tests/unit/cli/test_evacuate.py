"""The question before a host is emptied: Ctrl-C leaves it, whatever it means later."""

import io
import signal
import sys

import pytest

from vmckpt.cli import evacuate
from vmckpt.evacuation.task import Kind, Task

ORDER = Task(kind=Kind.EVACUATE, host="alpha")


class Interrupted(io.StringIO):
    """Somebody presses Ctrl-C instead of answering."""

    def readline(self, *_: object) -> str:  # type: ignore[override]
        signal.raise_signal(signal.SIGINT)
        return "y\n"


@pytest.mark.parametrize(
    ("answer", "agreed"),
    [(io.StringIO("y\n"), True), (io.StringIO("\n"), False), (Interrupted(), False)],
)
def test_who_does_not_say_yes_has_not_agreed(
    monkeypatch: pytest.MonkeyPatch, answer: io.StringIO, agreed: bool
) -> None:
    later: list[int] = []
    # Once guests are moving Ctrl-C stops the run: as here, it raises nothing.
    before = signal.signal(signal.SIGINT, lambda number, _: later.append(number))
    monkeypatch.setattr(sys, "stdin", answer)
    try:
        assert evacuate._agreed(ORDER) is agreed
        assert later == []
        signal.raise_signal(signal.SIGINT)
        assert later == [signal.SIGINT], "it means again what it meant before"
    finally:
        signal.signal(signal.SIGINT, before)
