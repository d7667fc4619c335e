"""The progress of a running migration: passes, bandwidth, stalls, and how long it will take. Pure.

Model of the estimate: geometric pre-copy. A pass that takes T seconds leaves S dirty bytes for the
next one, which takes S/B at bandwidth B; so passes shrink by r = S/(T·B) until what is left can be
sent within the downtime limit (Clark et al., Live Migration of Virtual Machines, NSDI 2005,
section 3).

QEMU's own dirty rate is not used: it counts a page once for a pass however often it was written, so
for a guest that rewrites one region for ever it sinks to the bandwidth and promises an end.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.run.outcome import PassCounter
from vmckpt.model.events import Estimate, Event, Sampled
from vmckpt.model.migration import JobPhase, JobSample, JobTotals
from vmckpt.policy.model import Stall
from vmckpt.units import Bytes, BytesPerSecond, Seconds

UNKNOWN = DirtyCurve()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeen:
    """One pass over memory, so far."""

    number: int
    began: Seconds
    size: int
    """The most that was left in it: what its beginning found dirty."""
    sent_before: int
    """Bytes sent before it. Empty pages cost next to nothing: a pass sends less than its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHistory:
    """A migration so far. Made by `seen` from sample to sample."""

    began: Seconds
    curve: DirtyCurve = UNKNOWN
    last: JobSample | None = None
    passes: tuple[PassSeen, ...] = ()
    bandwidth: BytesPerSecond = BytesPerSecond(0)
    """Moving average of what the samples say."""
    moved_at: Seconds | None = None
    """When bytes were last seen to move; None: never yet."""

    @property
    def iteration(self) -> int:
        return self.passes[-1].number if self.passes else 0

    def sent_in(self, index: int) -> int:
        """Bytes that the pass at that index of `passes` has sent."""
        if index + 1 < len(self.passes):
            until = self.passes[index + 1].sent_before
        else:
            until = self.last.transferred if self.last is not None else 0
        return max(1, until - self.passes[index].sent_before)

    @property
    def shrink(self) -> float | None:
        """What the last pass left dirty over what it sent; 1 and more never ends; None: unknown."""
        if len(self.passes) < 2 or not self.bandwidth:
            return None
        return self.passes[-1].size / self.sent_in(len(self.passes) - 2)

    @property
    def downtime(self) -> Seconds | None:
        """The pause if the guest stopped at the end of this pass; None before the second."""
        if len(self.passes) < 2 or not self.bandwidth:
            return None
        following = self.curve.within(self.passes[-1].size / self.bandwidth)
        return Seconds(following / self.bandwidth)

    def best(self, margin: float) -> PassSeen | None:
        """The last pass that began with less than all before it; None before the first."""
        best: PassSeen | None = None
        for one in self.passes:
            if best is None or one.size < best.size * (1 - margin):
                best = one
        return best

    def stalled_for(self, now: Seconds, stall: Stall) -> Seconds:
        """For how long nothing has got better; 0 while it gets better.

        Passes are compared by what they began with: inside a pass the rest always falls.
        """
        best = self.best(stall.margin)
        if best is None or best is self.passes[-1] or now - best.began < stall.window:
            return Seconds(0.0)
        since = next(one.began for one in self.passes if one.number > best.number)
        return Seconds(now - since)

    def at_a_low(self, margin: float) -> bool:
        """Whether hardly a pass after the first began with less than the present one."""
        later = self.passes[1:]
        return not later or later[-1].size <= min(one.size for one in later) * (1 + margin)

    def silent_for(self, now: Seconds) -> Seconds:
        """For how long no byte has moved."""
        return Seconds(now - (self.began if self.moved_at is None else self.moved_at))


def seen(track: PassHistory, sample: JobSample, stall: Stall) -> PassHistory:
    """The track after one more sample."""
    before = track.last
    # The first look at a stream that another controller left says nothing about its being alive.
    first = before is None and sample.phase is not JobPhase.POST_COPY
    moved = first or (before is not None and sample.transferred > before.transferred)
    track = replace(
        track,
        last=sample,
        moved_at=sample.at if moved and sample.transferred else track.moved_at,
        bandwidth=_smoothed(track.bandwidth, sample.bandwidth, stall.smoothing),
    )
    if not sample.iteration or sample.phase is not JobPhase.PRE_COPY:
        return track
    return _passes(track, sample)


def _smoothed(average: int, newest: int, weight: float) -> BytesPerSecond:
    if not average or not newest:
        return BytesPerSecond(newest or average)
    return BytesPerSecond(round(weight * newest + (1 - weight) * average))


def _passes(track: PassHistory, sample: JobSample) -> PassHistory:
    here = track.passes[-1] if track.passes else None
    if here is None or sample.iteration > here.number:
        new = PassSeen(
            number=sample.iteration,
            began=sample.at,
            size=sample.remaining,
            sent_before=sample.transferred,
        )
        curve = track.curve
        # What the last pass left behind was dirtied while it lasted. A pass that was skipped
        # between two samples had its own share: the time is too long then, the point left out.
        if here is not None and sample.iteration == here.number + 1:
            curve = curve.with_point(sample.at - here.began, sample.remaining)
        return replace(track, passes=(*track.passes, new), curve=curve)
    larger = replace(here, size=max(here.size, sample.remaining))
    return replace(track, passes=(*track.passes[:-1], larger))


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
    seen = _passes_so_far(samples)
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


def _passes_so_far(samples: Sequence[JobSample]) -> list[_Pass]:
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


INTERVAL = Seconds(0.2)
# Towards the end of a pass it is looked more often: the first moments of the next one count.
_SHORTEST = Seconds(0.05)


class ProgressTracker:
    """Takes raw samples; keeps all of them, the track and how far it has come."""

    def __init__(self, curve: DirtyCurve, stall: Stall) -> None:
        self._stall = stall
        self._counter = PassCounter()
        self._share = 0.0
        self.track = PassHistory(began=Seconds(0.0), curve=curve)
        self.samples: list[JobSample] = []

    def begin(self, now: Seconds) -> None:
        """The move begins now."""
        self.track = dataclasses.replace(self.track, began=now)

    def join(self, now: Seconds) -> None:
        """It began under another controller: its passes are counted as QEMU has them."""
        self.begin(now)
        self._counter = PassCounter(0)

    def take(self, raw: JobSample) -> JobSample | None:
        """Keep a sample and number its pass; None if QEMU has not begun: nothing to show."""
        self._counter = self._counter.after(raw.iteration)
        sample = dataclasses.replace(raw, iteration=self._counter.number(raw.iteration))
        if sample.iteration == 0 and not sample.total:
            return None
        self.samples.append(sample)
        self.track = seen(self.track, sample, self._stall)
        return sample

    def tell(self, sample: JobSample, max_downtime: Seconds, emit: Callable[[Event], None]) -> None:
        """Tell of a sample, with an estimate of what is left."""
        guess = self._estimate(sample, max_downtime)
        share = share_done(guess, Seconds(sample.at - self.track.began))
        self._share = max(self._share, share)
        emit(Sampled(sample=sample, estimate=guess, done=self._share))

    def _estimate(self, sample: JobSample, max_downtime: Seconds) -> Estimate:
        """From where the last passes began: to go through all samples each time takes too long."""
        began = [
            dataclasses.replace(sample, at=p.began, iteration=p.number, remaining=Bytes(p.size))
            for p in self.track.passes[-3:]
        ]
        return estimate([*began, sample], max_downtime)

    def until_next(self) -> Seconds:
        """The usual interval, or less if the pass at hand will be over before."""
        last = self.track.last
        if last is None or last.phase is not JobPhase.PRE_COPY or not last.bandwidth:
            return INTERVAL
        return Seconds(max(_SHORTEST, min(INTERVAL, last.remaining / last.bandwidth)))

    def numbered(self, totals: JobTotals) -> JobTotals:
        """The totals with their passes counted as the samples' are."""
        return dataclasses.replace(totals, iterations=self._counter.number(totals.iterations))
