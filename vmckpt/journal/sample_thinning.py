"""Decide which samples of an ended operation to keep, depending on the operation's age. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.units import Seconds

_HOUR = 3600.0
_DAY = 24 * _HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a `Retention`."""

    until: Seconds
    """Age of an ended operation up to which this step applies."""
    spacing: Seconds
    """For each interval of this length, one sample is kept; 0: all samples are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long samples, events and operations are kept."""

    steps: tuple[Step, ...] = (
        Step(until=Seconds(_HOUR), spacing=Seconds(0.0)),
        Step(until=Seconds(7 * _DAY), spacing=Seconds(1.0)),
        Step(until=Seconds(90 * _DAY), spacing=Seconds(10.0)),
    )
    """The steps by increasing age. After the last step, samples and events are deleted."""
    operations: Seconds = Seconds(365 * _DAY)
    """Age of an ended operation at which it is deleted, with its report."""


def due(age: Seconds, retention: Retention) -> int:
    """Return the index of the retention step for an operation that ended `age` ago.

    Returns the number of steps if the operation's samples are to be deleted.
    """
    return sum(age >= step.until for step in retention.steps)


def kept(times: Sequence[float], spacing: Seconds) -> list[int]:
    """Return the indexes of the samples to keep, for ascending `times`.

    Keeps the first sample in each interval of length `spacing`, and the last sample, which has the
    final progress. Intervals start at 0. So thinning twice, or first finely and then coarsely, has
    the same result as thinning once.
    """
    if spacing <= 0 or not times:
        return list(range(len(times)))
    chosen = [
        index
        for index, time in enumerate(times)
        if index == 0 or time // spacing != times[index - 1] // spacing
    ]
    last = len(times) - 1
    return chosen if chosen[-1] == last else [*chosen, last]
