"""Track the progress of a running migration: passes, bandwidth, stalls, time left. Pure.

Model of the estimate: geometric pre-copy. A pass that takes T seconds leaves S dirty bytes for the
next pass, which takes S/B seconds at bandwidth B. So passes shrink by r = S/(T·B) until the rest
can be sent within the downtime limit (Clark et al., Live Migration of Virtual Machines, NSDI 2005,
section 3).

QEMU's own dirty rate is not used: it counts a page once per pass, no matter how often the page was
written. For a guest that keeps rewriting one region, this rate falls to the bandwidth and wrongly
predicts that pre-copy will converge.
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
    """Largest number of bytes left in any sample of the pass: about what was dirty at its start."""
    sent_before: int
    """Number of bytes sent before this pass. A pass sends less than its size if pages are zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHistory:
    """The course of a migration so far. `seen` adds each sample."""

    began: Seconds
    curve: DirtyCurve = UNKNOWN
    last: JobSample | None = None
    passes: tuple[PassSeen, ...] = ()
    bandwidth: BytesPerSecond = BytesPerSecond(0)
    """Moving average over the samples."""
    moved_at: Seconds | None = None
    """When data last moved; None if it never has."""

    @property
    def iteration(self) -> int:
        return self.passes[-1].number if self.passes else 0

    def sent_in(self, index: int) -> int:
        """Return the bytes sent by the pass at this index of `passes`, at least 1."""
        if index + 1 < len(self.passes):
            until = self.passes[index + 1].sent_before
        else:
            until = self.last.transferred if self.last is not None else 0
        return max(1, until - self.passes[index].sent_before)

    @property
    def shrink(self) -> float | None:
        """Bytes that the last pass left dirty, as a fraction of the bytes it sent; None: unknown.

        If the fraction is 1 or more, pre-copy does not converge.
        """
        if len(self.passes) < 2 or not self.bandwidth:
            return None
        return self.passes[-1].size / self.sent_in(len(self.passes) - 2)

    @property
    def downtime(self) -> Seconds | None:
        """The downtime if the guest were paused at the end of this pass.

        None before the second pass, or if the bandwidth is unknown.
        """
        if len(self.passes) < 2 or not self.bandwidth:
            return None
        following = self.curve.within(self.passes[-1].size / self.bandwidth)
        return Seconds(following / self.bandwidth)

    def best(self, margin: float) -> PassSeen | None:
        """Return the last pass that began with less data than all earlier passes.

        None before the first pass. `margin`: required improvement, as a fraction.
        """
        best: PassSeen | None = None
        for one in self.passes:
            if best is None or one.size < best.size * (1 - margin):
                best = one
        return best

    def stalled_for(self, now: Seconds, stall: Stall) -> Seconds:
        """Return how long there has been no progress; 0 while there is progress.

        Also 0 until `stall.window` has passed since the best pass began. Passes are compared by
        their size at the start, since the rest always falls within a pass.
        """
        best = self.best(stall.margin)
        if best is None or best is self.passes[-1] or now - best.began < stall.window:
            return Seconds(0.0)
        since = next(one.began for one in self.passes if one.number > best.number)
        return Seconds(now - since)

    def at_a_low(self, margin: float) -> bool:
        """Return whether the current pass began with about as little data as any pass after the
        first. `margin`: the permitted excess, as a fraction."""
        later = self.passes[1:]
        return not later or later[-1].size <= min(one.size for one in later) * (1 + margin)

    def silent_for(self, now: Seconds) -> Seconds:
        """Return how long no data has moved."""
        return Seconds(now - (self.began if self.moved_at is None else self.moved_at))


def seen(track: PassHistory, sample: JobSample, stall: Stall) -> PassHistory:
    """Return the track with one more sample."""
    before = track.last
    # The first sample of a stream that another controller started does not show whether data is
    # moving.
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
        # The bytes that the last pass left were dirtied during that pass. If a pass was missed
        # between two samples, the measured time is too long, and the point is left out.
        if here is not None and sample.iteration == here.number + 1:
            curve = curve.with_point(sample.at - here.began, sample.remaining)
        return replace(track, passes=(*track.passes, new), curve=curve)
    larger = replace(here, size=max(here.size, sample.remaining))
    return replace(track, passes=(*track.passes[:-1], larger))


# From pass to pass, r varies by about this fraction in either direction.
_SPREAD = 0.3
# If passes shrink by less than a tenth, pre-copy needs dozens more.
_STANDS_STILL = 0.9


@dataclass(frozen=True, slots=True)
class _Pass:
    began: Seconds
    size: int
    """Largest number of bytes left in any sample of the pass: about what was dirty at its start."""


def estimate(samples: Sequence[JobSample], max_downtime: Seconds) -> Estimate:
    """Return an estimate of the remaining time, as of the last sample; unknown fields are None.

    `max_downtime`: the downtime limit at which QEMU switches over.
    """
    if not samples or (now := samples[-1]).bandwidth <= 0:
        return Estimate(low=None, high=None, converging=None)
    rest = Seconds(now.remaining / now.bandwidth)
    if now.phase in (JobPhase.SWITCHOVER, JobPhase.POST_COPY):
        return Estimate(low=rest, high=Seconds(2 * rest + 1.0), converging=True)
    seen = _passes_so_far(samples)
    if len(seen) < 2:
        # First pass: how much must be sent again is not known yet.
        return Estimate(low=rest, high=None, converging=None)
    before, here = seen[-2:]
    at_once = now.bandwidth * max_downtime
    shrinks = here.size / max(1.0, (here.began - before.began) * now.bandwidth)
    low = _after(rest, here.size, at_once, shrinks * (1 - _SPREAD), now.bandwidth)
    if len(seen) < 3:
        # The size of a single pass may be the guest's working set, which never shrinks.
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
    """Return `rest` plus the time of all passes after a pass of `size` bytes; None if endless.

    `at_once`: a pass of at most this many bytes is the last. `shrinks`: size of each pass as a
    share of the one before it. `bandwidth`: in bytes per second.
    """
    following = size * shrinks
    if size <= at_once or following <= 0:
        return rest
    if shrinks >= 1:
        return None
    count = max(1, math.ceil(math.log(at_once / size, shrinks))) if at_once > 0 else 100
    return Seconds(rest + following * (1 - shrinks**count) / (1 - shrinks) / bandwidth)


def share_done(estimate: Estimate, elapsed: Seconds) -> float:
    """Return the fraction of the expected time that has passed, 0 to 1; 0 while unknown.

    `elapsed`: time since the migration began. The amount of memory sent is not used: pages are sent
    repeatedly, so this amount exceeds the total, and the remaining amount rises again with every
    pass.
    """
    if estimate.low is None or elapsed <= 0:
        return 0.0
    rest = estimate.low if estimate.high is None else (estimate.low + estimate.high) / 2
    return elapsed / (elapsed + rest)


INTERVAL = Seconds(0.2)
# Samples are more frequent near the end of a pass, to catch the start of the next pass.
_SHORTEST = Seconds(0.05)


class ProgressTracker:
    """Keeps a migration's samples, its pass history, and the fraction that is done."""

    def __init__(self, curve: DirtyCurve, stall: Stall) -> None:
        self._stall = stall
        self._counter = PassCounter()
        self._share = 0.0
        self.track = PassHistory(began=Seconds(0.0), curve=curve)
        self.samples: list[JobSample] = []

    def begin(self, now: Seconds) -> None:
        """Record that the migration begins now."""
        self.track = dataclasses.replace(self.track, began=now)

    def join(self, now: Seconds) -> None:
        """Join a migration that another controller started; passes keep QEMU's numbers."""
        self.begin(now)
        self._counter = PassCounter(0)

    def take(self, raw: JobSample) -> JobSample | None:
        """Keep a sample and number its pass. Returns None if QEMU has not started the job yet."""
        self._counter = self._counter.after(raw.iteration)
        sample = dataclasses.replace(raw, iteration=self._counter.number(raw.iteration))
        if sample.iteration == 0 and not sample.total:
            return None
        self.samples.append(sample)
        self.track = seen(self.track, sample, self._stall)
        return sample

    def tell(self, sample: JobSample, max_downtime: Seconds, emit: Callable[[Event], None]) -> None:
        """Pass a sample to `emit`, with an estimate of the remaining time.

        `max_downtime`: the downtime limit at which QEMU switches over.
        """
        guess = self._estimate(sample, max_downtime)
        share = share_done(guess, Seconds(sample.at - self.track.began))
        self._share = max(self._share, share)
        emit(Sampled(sample=sample, estimate=guess, done=self._share))

    def _estimate(self, sample: JobSample, max_downtime: Seconds) -> Estimate:
        """Estimate from the starts of the last passes, because using all samples would take too
        long."""
        began = [
            dataclasses.replace(sample, at=p.began, iteration=p.number, remaining=Bytes(p.size))
            for p in self.track.passes[-3:]
        ]
        return estimate([*began, sample], max_downtime)

    def until_next(self) -> Seconds:
        """Return the time until the next sample; less than usual if the pass ends sooner."""
        last = self.track.last
        if last is None or last.phase is not JobPhase.PRE_COPY or not last.bandwidth:
            return INTERVAL
        return Seconds(max(_SHORTEST, min(INTERVAL, last.remaining / last.bandwidth)))

    def numbered(self, totals: JobTotals) -> JobTotals:
        """Return the totals with passes numbered as in the samples."""
        return dataclasses.replace(totals, iterations=self._counter.number(totals.iterations))
