"""How long will it still take? A range, or that it does not converge. Pure.

Model: geometric pre-copy. A pass that takes T seconds leaves S dirty bytes for the next one, which
takes S/B at bandwidth B; so passes shrink by r = S/(T·B) until what is left can be sent within the
downtime limit (Clark et al., Live Migration of Virtual Machines, NSDI 2005, section 3).

QEMU's own dirty rate is not used: it counts a page once for a pass however often it was written,
so for a guest that rewrites one region for ever it sinks to the bandwidth and promises an end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.model.events import Estimate
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import Seconds

# From pass to pass r varies by about that much either way.
_SPREAD = 0.3
# Passes that shrink by less than a tenth would take dozens more.
_STANDS_STILL = 0.9


@dataclass(frozen=True, slots=True)
class _Pass:
    began: Seconds
    size: int
    """The most that was left in it: what its start found dirty."""


def estimate(samples: Sequence[JobSample], max_downtime: Seconds) -> Estimate:
    """The time that is left, seen from the last sample."""
    if not samples or (now := samples[-1]).bandwidth <= 0:
        return Estimate(low=None, high=None, converging=None)
    rest = Seconds(now.remaining / now.bandwidth)
    if now.phase in (JobPhase.SWITCHOVER, JobPhase.POST_COPY):
        return Estimate(low=rest, high=Seconds(2 * rest + 1.0), converging=True)
    seen = _passes(samples)
    if len(seen) < 2:
        # First pass: how much of it will have to be sent again is not known yet.
        return Estimate(low=rest, high=None, converging=None)
    before, here = seen[-2:]
    at_once = now.bandwidth * max_downtime
    shrinks = here.size / max(1.0, (here.began - before.began) * now.bandwidth)
    low = _after(rest, here.size, at_once, shrinks * (1 - _SPREAD), now.bandwidth)
    if len(seen) < 3:
        # One size alone may be the guest's whole working set, which then never shrinks.
        return Estimate(low=low if low is not None else rest, high=None, converging=None)
    if shrinks >= _STANDS_STILL and here.size > at_once:
        return Estimate(low=None, high=None, converging=False)
    high = _after(rest, here.size, at_once, shrinks * (1 + _SPREAD), now.bandwidth)
    return Estimate(low=low, high=high, converging=True)


def _passes(samples: Sequence[JobSample]) -> list[_Pass]:
    found: dict[int, _Pass] = {}
    for sample in samples:
        known = found.get(sample.iteration, _Pass(sample.at, 0))
        found[sample.iteration] = _Pass(known.began, max(known.size, sample.remaining))
    return list(found.values())


def _after(
    rest: Seconds, size: int, at_once: float, shrinks: float, bandwidth: int
) -> Seconds | None:
    """`rest` and all passes that follow one of `size` bytes; None if they do not shrink."""
    following = size * shrinks
    if size <= at_once or following <= 0:
        return rest
    if shrinks >= 1:
        return None
    count = max(1, math.ceil(math.log(at_once / size, shrinks))) if at_once > 0 else 100
    return Seconds(rest + following * (1 - shrinks**count) / (1 - shrinks) / bandwidth)


def share_done(estimate: Estimate, elapsed: Seconds) -> float:
    """Share of the time that has passed, 0 to 1; 0 while nothing can be said.

    Not from the memory processed: pages are sent again and again, so it exceeds the total, and what
    remains goes up again with every pass.
    """
    if estimate.low is None or elapsed <= 0:
        return 0.0
    rest = estimate.low if estimate.high is None else (estimate.low + estimate.high) / 2
    return elapsed / (elapsed + rest)
