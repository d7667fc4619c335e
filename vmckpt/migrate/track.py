"""What the samples of a running migration add up to: passes, bandwidth, lows, stalls. Pure."""

from dataclasses import dataclass, replace

from vmckpt.migrate.dirtying import DirtyCurve
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.policy.model import Stall
from vmckpt.units import BytesPerSecond, Seconds

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
class Track:
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


def seen(track: Track, sample: JobSample, stall: Stall) -> Track:
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


def _passes(track: Track, sample: JobSample) -> Track:
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
