"""Decide which samples of an ended operation to keep, by its age. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.units import Seconds

_HOUR = 3600.0
_DAY = 24 * _HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a retention."""

    until: Seconds
    """Age of an ended operation up to which this step applies."""
    spacing: Seconds
    """One sample is kept for each interval of this length; 0: all samples are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long samples, events and operations are kept."""

    steps: tuple[Step, ...] = (
        Step(until=Seconds(_HOUR), spacing=Seconds(0.0)),
        Step(until=Seconds(7 * _DAY), spacing=Seconds(1.0)),
        Step(until=Seconds(90 * _DAY), spacing=Seconds(10.0)),
    )
    """After the last step, samples and events are deleted."""
    operations: Seconds = Seconds(365 * _DAY)
    """Age at which operations and their reports are deleted."""


def due(age: Seconds, retention: Retention) -> int:
    """Return the index of the step for an operation that ended `age` ago.

    The number of steps if its samples are to be deleted.
    """
    return sum(age >= step.until for step in retention.steps)


def kept(times: Sequence[float], spacing: Seconds) -> list[int]:
    """Return the indexes of the samples to keep, for ascending `times`.

    Keeps the first sample of each interval of `spacing`, and the last sample, which has the final
    progress. Intervals start at 0, so thinning again, or first finely and then coarsely, gives the
    same result.
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
