"""Which samples of an operation that has ended are kept for how long. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.units import Seconds

_HOUR = 3600.0
_DAY = 24 * _HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a retention."""

    until: Seconds
    """Time since the operation ended up to which it holds."""
    spacing: Seconds
    """One sample is kept of each such stretch; 0: all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long what is kept."""

    steps: tuple[Step, ...] = (
        Step(until=Seconds(_HOUR), spacing=Seconds(0.0)),
        Step(until=Seconds(7 * _DAY), spacing=Seconds(1.0)),
        Step(until=Seconds(90 * _DAY), spacing=Seconds(10.0)),
    )
    """After the last one samples and events are gone."""
    operations: Seconds = Seconds(365 * _DAY)
    """After that operations and their reports are gone too."""


def due(age: Seconds, retention: Retention) -> int:
    """The step that holds for an operation that ended `age` ago; past the last one: gone."""
    return sum(age >= step.until for step in retention.steps)


def kept(times: Sequence[float], spacing: Seconds) -> list[int]:
    """Indexes of the samples to keep of ascending `times`.

    The first of each stretch of `spacing`, and the very last, which says how far it came. Stretches
    are counted from 0, so thinning again, or first finely and then coarsely, ends in the same.
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
