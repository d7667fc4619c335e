"""How much memory a guest dirties over time, and how pre-copy proceeds from that. Pure.

The curve U(t) is the number of *different* bytes a guest writes within t seconds. It is concave: a
page that was written counts once. So the curve of a guest that keeps rewriting one region levels
off at that region's size, its writable working set (Clark et al., Live Migration of Virtual
Machines, NSDI 2005, section 2.2). A rate alone would predict convergence that never happens, or
miss convergence that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from vmckpt.units import BytesPerSecond, Seconds

# If only one point is known: how much steeper than a straight line the curve may start. Rates
# measured during migrations were two to three times the rates measured before them (the figure is
# from KubeVirt's enhancement 246).
_STEEPER = 3.0
# Pre-copy does not converge if a pass is larger than this share of the pass before.
_SHRINKS = 0.98
_MOST_PASSES = 60


@dataclass(frozen=True, slots=True)
class DirtyCurve:
    """U(t) through measured points (seconds, bytes), in any order."""

    points: tuple[tuple[float, float], ...] = ()
    memory: float = field(default=float("inf"))
    """The guest's memory, in bytes: the upper bound of the curve."""
    in_use: float = field(default=float("inf"))
    """Bytes of pages that are not all zero; infinite if unknown."""

    def with_point(self, time: float, dirtied: float) -> "DirtyCurve":
        """Return the curve with one more point (seconds, bytes).

        The point replaces points at about the same time. A point at time 0 or below is ignored.
        """
        if time <= 0:
            return self
        kept = [(t, u) for t, u in self.points if not 0.8 < t / time < 1.25]
        return replace(self, points=(*kept, (time, dirtied)))

    def within(self, time: float) -> float:
        """Return U(time) in bytes: linear between the points, extrapolated beyond the last point.

        A curve with a single point may start steeper. Without points, the result is 0.
        """
        known = self._hull()
        if not known or time <= 0:
            return 0.0
        if len(known) == 1:
            t, u = known[0]
            guess = u * min(1.0, _STEEPER * time / t) if time <= t else u * time / t
            return min(self.memory, guess)
        (t0, u0), (t1, u1) = known[-2:]
        if time > t1:
            return min(self.memory, u1 + (time - t1) * max(0.0, (u1 - u0) / (t1 - t0)))
        for (ta, ua), (tb, ub) in pairwise([(0.0, 0.0), *known]):
            if time <= tb:
                return min(self.memory, ua + (ub - ua) * (time - ta) / (tb - ta))
        raise AssertionError("the last point is not before the time")

    def _hull(self) -> list[tuple[float, float]]:
        """Return the points in order, one per time. Decreases are noise and are levelled out."""
        known: dict[float, float] = {}
        most = 0.0
        for time, dirtied in sorted(self.points):
            most = known[time] = max(most, dirtied)
        return list(known.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCourse:
    """How pre-copy would continue from the beginning of a pass.

    If pre-copy does not converge, the numbers end with the pass that shows this.
    """

    converges: bool
    passes: int
    """Number of passes from the current one to the last before the switchover."""
    resent: float
    """Bytes sent after the current pass, including the switchover."""
    last: float
    """Bytes sent while the guest is paused."""
    lasts: Seconds


def course(
    curve: DirtyCurve, size: float, bandwidth: BytesPerSecond | float, max_downtime: Seconds
) -> PassCourse:
    """Return how pre-copy continues from a pass of `size` bytes at `bandwidth` bytes per second.

    As in QEMU, passes are repeated until the rest can be sent within `max_downtime`.
    """
    if bandwidth <= 0:
        return PassCourse(
            converges=False, passes=0, resent=0.0, last=size, lasts=Seconds(float("inf"))
        )
    at_once = bandwidth * max_downtime
    here, resent, lasts, passes = size, 0.0, 0.0, 0
    while here > at_once and passes < _MOST_PASSES:
        took = here / bandwidth
        lasts += took
        passes += 1
        following = curve.within(took)
        resent += following
        if following > at_once and following >= _SHRINKS * here and passes > 1:
            return PassCourse(
                converges=False, passes=passes, resent=resent, last=following, lasts=Seconds(lasts)
            )
        here = following
    return PassCourse(
        converges=here <= at_once,
        passes=passes,
        resent=resent,
        last=here,
        lasts=Seconds(lasts + here / bandwidth),
    )


def saturates(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the measured curve has levelled off.

    Its final slope is then less than a fifth of its mean slope. False if there are fewer than two
    points.
    """
    if len(points) < 2:
        return False
    (t0, u0), (t1, u1) = sorted(points)[-2:]
    slope, mean = (u1 - u0) / (t1 - t0), u1 / t1
    return slope < 0.2 * mean
