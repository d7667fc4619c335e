"""How long will it still take? A range, or that it does not converge. Pure.

Model: geometric pre-copy. A pass over R bytes at B bytes/s leaves R·D/B dirty ones when the guest
dirties D bytes/s, so passes shrink by r = D/B until what is left can be sent within the downtime
limit (Clark et al., Live Migration of Virtual Machines, NSDI 2005, section 3).
"""

import math
from collections.abc import Sequence

from vmckpt.model.events import Estimate
from vmckpt.model.jobs import JobPhase, JobSample
from vmckpt.units import Bytes, BytesPerSecond, Seconds

# The dirty rate of the next pass differs from the last one's by about that much either way.
_SPREAD = 0.3
_UNKNOWN = Estimate(low=None, high=None, converging=None)


def estimate(samples: Sequence[JobSample], max_downtime: Seconds) -> Estimate:
    """The time that is left, seen from the last sample."""
    if not samples or (now := samples[-1]).bandwidth <= 0:
        return _UNKNOWN
    if now.phase in (JobPhase.SWITCHOVER, JobPhase.POST_COPY):
        left = Seconds(now.remaining / now.bandwidth)
        return Estimate(low=left, high=Seconds(2 * left + 1.0), converging=True)
    if now.dirty_rate is None:
        # First pass: how much of it will have to be sent again is not known yet.
        return Estimate(low=Seconds(now.remaining / now.bandwidth), high=None, converging=None)
    low = _time_left(now.remaining, now.bandwidth, now.dirty_rate * (1 - _SPREAD), max_downtime)
    high = _time_left(now.remaining, now.bandwidth, now.dirty_rate * (1 + _SPREAD), max_downtime)
    converging = low is not None or _still_falling(samples)
    return Estimate(low=low, high=high, converging=converging)


def _time_left(
    remaining: Bytes, bandwidth: BytesPerSecond, dirty_rate: float, max_downtime: Seconds
) -> Seconds | None:
    """Time until the switchover is over; None if passes do not shrink."""
    at_once = bandwidth * max_downtime
    first = remaining / bandwidth
    if remaining <= at_once:
        return Seconds(first)
    ratio = dirty_rate / bandwidth
    if ratio >= 1:
        return None
    passes = 1 if ratio == 0 else max(1, math.ceil(math.log(at_once / remaining, ratio)))
    return Seconds(first * (1 - ratio ** (passes + 1)) / (1 - ratio))


def _still_falling(samples: Sequence[JobSample]) -> bool:
    """Whether each of the last three passes ended with less left than the one before."""
    lows: dict[int, int] = {}
    for sample in samples:
        lows[sample.iteration] = min(sample.remaining, lows.get(sample.iteration, sample.remaining))
    last = [lows[iteration] for iteration in sorted(lows)][-3:]
    return len(last) == 3 and last[0] > last[1] > last[2]


def share_done(samples: Sequence[JobSample]) -> float:
    """Share of the work that is done, 0 to 1, from the least that was ever left.

    Not from the memory processed: pages are sent again and again, so it exceeds the total.
    """
    totals = [sample.total for sample in samples if sample.total]
    if not totals:
        return 0.0
    least = min(sample.remaining for sample in samples if sample.total)
    return max(0.0, min(1.0, 1 - least / max(totals)))
