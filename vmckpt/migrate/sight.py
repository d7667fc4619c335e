"""What is seen of one running migration: its samples, and what they add up to."""

import dataclasses
from collections.abc import Callable

from vmckpt.migrate import estimate, track
from vmckpt.migrate.dirtying import DirtyCurve
from vmckpt.migrate.track import Track
from vmckpt.migrate.watch import PassCounter
from vmckpt.model.events import Estimate, Event, Sampled
from vmckpt.model.migration import JobPhase, JobSample, JobTotals
from vmckpt.policy.model import Stall
from vmckpt.units import Bytes, Seconds

INTERVAL = Seconds(0.2)
# Towards the end of a pass it is looked more often: the first moments of the next one count.
_SHORTEST = Seconds(0.05)


class Sight:
    """Takes raw samples; keeps all of them, the track and how far it has come."""

    def __init__(self, curve: DirtyCurve, stall: Stall) -> None:
        self._stall = stall
        self._counter = PassCounter()
        self._share = 0.0
        self.track = Track(began=Seconds(0.0), curve=curve)
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
        self.track = track.seen(self.track, sample, self._stall)
        return sample

    def tell(self, sample: JobSample, max_downtime: Seconds, emit: Callable[[Event], None]) -> None:
        """Tell of a sample, with an estimate of what is left."""
        guess = self._estimate(sample, max_downtime)
        share = estimate.share_done(guess, Seconds(sample.at - self.track.began))
        self._share = max(self._share, share)
        emit(Sampled(sample=sample, estimate=guess, done=self._share))

    def _estimate(self, sample: JobSample, max_downtime: Seconds) -> Estimate:
        """From where the last passes began: to go through all samples each time takes too long."""
        began = [
            dataclasses.replace(sample, at=p.began, iteration=p.number, remaining=Bytes(p.size))
            for p in self.track.passes[-3:]
        ]
        return estimate.estimate([*began, sample], max_downtime)

    def until_next(self) -> Seconds:
        """The usual interval, or less if the pass at hand will be over before."""
        last = self.track.last
        if last is None or last.phase is not JobPhase.PRE_COPY or not last.bandwidth:
            return INTERVAL
        return Seconds(max(_SHORTEST, min(INTERVAL, last.remaining / last.bandwidth)))

    def numbered(self, totals: JobTotals) -> JobTotals:
        """The totals with their passes counted as the samples' are."""
        return dataclasses.replace(totals, iterations=self._counter.number(totals.iterations))
