"""Decide whether a running guest's written pages are copied once more before the last pause. Pure.

Each round copies the pages that were written during the round before. The pages that remain are
copied in the last pause.
"""

from dataclasses import dataclass
from enum import Enum, auto

from vmckpt.units import Seconds

SHORT = Seconds(0.02)
"""If the remaining pages can be copied within this time, another round would gain nothing."""
LONGEST = Seconds(0.3)
"""The last pause does not begin if copying is expected to take longer than this."""
MOST_PAGES = 1 << 16
"""Maximum number of pages that are copied in the last pause, to memory: 256 MiB."""
MOST_ROUNDS = 6
_WORTH = 0.7
"""Another round is worthwhile if the previous one left at most this share of the pages."""
ASSUMED = 1 << 18
"""The assumed copy rate in pages per second, before any page was copied: 1 GiB/s."""


class Step(Enum):
    """The next step of a capture."""

    COPY = auto()
    """Copy the written pages while the guest runs."""
    FINISH = auto()
    """Pause the guest and copy the rest."""
    GIVE_UP = auto()
    """The guest writes too fast; use another method."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a capture while the guest runs."""

    rounds: int
    """Number of completed rounds."""
    remaining: int
    """Number of pages that were written and not copied since."""
    before: int
    """The value of `remaining` before the last round; 0: there was no round yet."""
    rate: float
    """Number of pages that can be copied per second."""


def pause(progress: Progress) -> Seconds:
    """Return how long copying the remaining pages takes."""
    return Seconds(progress.remaining / progress.rate)


def decide(progress: Progress) -> Step:
    """Return the next step."""
    expected = pause(progress)
    if expected <= SHORT:
        return Step.FINISH
    gains = not progress.rounds or progress.remaining <= _WORTH * progress.before
    if progress.rounds < MOST_ROUNDS and gains:
        return Step.COPY
    if expected <= LONGEST and progress.remaining <= MOST_PAGES:
        return Step.FINISH
    return Step.GIVE_UP
