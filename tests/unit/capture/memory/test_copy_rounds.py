"""When a guest's written pages are copied once more, and when the rest waits for the pause."""

from typing import Any

import pytest

from vmckpt.capture.memory import copy_rounds
from vmckpt.capture.memory.copy_rounds import MOST_PAGES, MOST_ROUNDS, Progress, Step

RATE = 250_000.0  # pages per second: 1 GiB/s


@pytest.mark.parametrize(
    ("rounds", "remaining", "before", "step"),
    [
        (0, 0, 0, Step.FINISH),  # nothing was written since the last snapshot
        (0, 5_000, 0, Step.FINISH),  # 20 ms
        (0, 5_001, 0, Step.COPY),
        (0, 16_000_000, 0, Step.COPY),  # a first snapshot of 64 GiB
        (1, 4_000, 16_000_000, Step.FINISH),
        (1, 40_000, 1_000_000, Step.COPY),  # it wrote 160 MiB during the first round
        (2, 8_000, 40_000, Step.COPY),
        (3, 7_000, 8_000, Step.FINISH),  # its pages become no fewer: 28 ms
        (1, 65_000, 70_000, Step.FINISH),  # 260 ms, and another round would not help
        (1, MOST_PAGES + 1, 70_000, Step.GIVE_UP),
        (2, 80_000, 90_000, Step.GIVE_UP),
        (MOST_ROUNDS, 10_000, 50_000, Step.FINISH),
        (MOST_ROUNDS, 100_000, 500_000, Step.GIVE_UP),
    ],
)
def test_rounds_go_on_while_they_help(rounds: int, remaining: int, before: int, step: Step) -> None:
    progress = Progress(rounds, remaining, before, RATE)
    assert copy_rounds.decide(progress) is step


def test_a_slow_host_gives_up_earlier() -> None:
    facts: dict[str, Any] = {"rounds": 2, "remaining": 20_000, "before": 20_000}
    assert copy_rounds.decide(Progress(**facts, rate=RATE)) is Step.FINISH
    assert copy_rounds.decide(Progress(**facts, rate=RATE / 10)) is Step.GIVE_UP


@pytest.mark.parametrize("written", [1_000, 20_000, 200_000, 2_000_000])  # pages per second
def test_a_guest_that_writes_at_any_rate_comes_to_an_end(written: int) -> None:
    progress = Progress(0, 1_000_000, 0, RATE)
    while (step := copy_rounds.decide(progress)) is Step.COPY:
        left = min(1_000_000, int(progress.remaining / RATE * written))
        progress = Progress(progress.rounds + 1, left, progress.remaining, RATE)
    assert step is (Step.FINISH if written < RATE / 2 else Step.GIVE_UP)
    if step is Step.FINISH:
        assert copy_rounds.pause(progress) <= copy_rounds.LONGEST
