"""Choose the moment of the switch to post-copy: the moment with the lowest cost. Pure.

In the first pass, waiting shortens post-copy at first and costs nothing, since each page is still
sent once. The longer pre-copy lasts, the more of the pages that it has sent are written again. From
some moment on, so much of the bandwidth is wasted that waiting costs more than it saves: for a
guest that keeps rewriting most of its memory, soon after the start. If a guest rewrites little, the
first pass ends before that moment, and the rest is compared with the passes that pre-copy still
needs.

The cost of a moment is the sum of three times, each with its weight from the policy:

- the time until the migration ends
- the time in post-copy
- the lost work: how long the guest waits for pages that it writes and the target does not have, or
  is paused in the switchover of pre-copy. Pages that the guest only reads are unknown and not
  counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.policy.model import SwitchCost
from vmckpt.units import Seconds

# How many moments of the current pass are compared.
_STEPS = 8
_MOST_PASSES = 60
# As in dirty_curve: pre-copy does not converge if a pass is larger than this share of the last.
_SHRINKS = 0.98

_WORTH_WAITING = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNow:
    """The current pass of a running pre-copy."""

    size: float
    """Bytes that were to be sent when the pass began."""
    left: float
    """How many of these bytes are left."""
    elapsed: Seconds
    """Time since the pass began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the migration would end, from now on."""

    total: Seconds
    postcopy: Seconds
    """Time in post-copy; 0: pre-copy converges without it."""
    lost: Seconds
    """Guest work lost, as the time for which the guest waits or is paused."""

    def cost(self, weights: SwitchCost) -> float:
        """Return the cost in weighted seconds."""
        return (
            weights.total_time * self.total
            + weights.postcopy_time * self.postcopy
            + weights.lost_work * self.lost
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How fast memory is sent, in bytes per second."""

    precopy: float
    postcopy: float


def endings(
    curve: DirtyCurve, here: PassNow, network: Network, max_downtime: Seconds
) -> Iterator[Ending]:
    """Yield the ending after a switch now, then after later switches, in the order of time.

    `here`: the current pass; `max_downtime`: the downtime at which pre-copy completes. If pre-copy
    converges, its ending is the last.
    """
    at_once = network.precopy * max_downtime
    waited, steps = 0.0, _STEPS
    for number in range(_MOST_PASSES):
        lasts = here.left / network.precopy
        for step in range(steps):
            share = step / steps
            later = PassNow(
                size=here.size, left=here.left * (1 - share),
                elapsed=Seconds(here.elapsed + lasts * share),
            )  # fmt: skip
            yield _switched(curve, later, network, waited + lasts * share)
        waited += lasts
        following = curve.within(here.elapsed + lasts)
        if following <= at_once:
            paused = Seconds(following / network.precopy)
            yield Ending(total=Seconds(waited + paused), postcopy=Seconds(0.0), lost=paused)
            return
        if number and following >= _SHRINKS * here.size:
            return
        here, steps = PassNow(size=following, left=following, elapsed=Seconds(0.0)), 1


def _switched(curve: DirtyCurve, here: PassNow, network: Network, waited: float) -> Ending:
    """Return the ending after a switch in this pass, after waiting for `waited` seconds."""
    written = curve.within(here.elapsed)
    unsent = here.left / max(here.size, written, 1.0)
    again = written * (1 - unsent)
    rest = here.left + again
    postcopy = rest / network.postcopy
    # Pages that the guest needs: those that it has written, and those that it will write.
    hot = max(again, curve.within(postcopy))
    missing = min(rest, again + (hot - again) * unsent)
    return Ending(
        total=Seconds(waited + postcopy), postcopy=Seconds(postcopy),
        lost=Seconds(missing / network.postcopy),
    )  # fmt: skip


def best_now(
    curve: DirtyCurve,
    here: PassNow,
    network: Network,
    max_downtime: Seconds,
    weights: SwitchCost,
) -> Ending | None:
    """Return the ending after a switch now; None if a later moment, or no switch, costs less.

    A cost that is only a little lower is no reason to wait: the next sample may miss the moment.
    """
    ahead = endings(curve, here, network, max_downtime)
    now = next(ahead)
    cost = now.cost(weights)
    # The cost grows at least as the time does, so the search for a lower cost ends.
    for one in ahead:
        if one.cost(weights) < _WORTH_WAITING * cost:
            return None
        if weights.total_time * (one.total - one.postcopy) > cost:
            break
    return now
