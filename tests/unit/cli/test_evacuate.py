"""What is asked before a host is emptied, and what is said afterwards."""

import io
import signal
import sys

import pytest

from vmckpt.cli import evacuate
from vmckpt.evacuation.interfaces import MoveEnd
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task
from vmckpt.units import Seconds

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


def test_guests_that_are_off_are_named_and_so_is_the_way_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = MoveEnd(arrived=(), shut_down=(), left=(), stopped=False, took=Seconds(5.0))
    evacuate.show_report(
        Report(
            task=ORDER,
            job="e-1",
            ended=ended,
            shut_down=("u-1", "u-2", "u-3"),
            suspended=frozenset({"u-2"}),
            names={"u-1": "web1", "u-2": "web2"},
        )
    )
    assert capsys.readouterr().out.splitlines()[:3] == [
        "shut down: web1; vmckpt repopulate alpha starts it again",
        "suspended: web2; vmckpt repopulate alpha resumes it",
        "shut down: u-3; vmckpt repopulate alpha starts it again",
    ]
