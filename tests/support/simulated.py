"""A guest on its way, as physics has it: writers, a link, and the passes of QEMU. Deterministic.

Time goes in small steps. What a writer dirties in a pass counts once for each page, so it levels
off at the writer's region. A pass ends when what is left could be sent within the downtime limit;
then the dirty bitmap is read, and either the guest stops or the next pass begins.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vmckpt.model.migration import AutoConverge, JobPhase, JobSample
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

GIB = 1024 * MIB
STEP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes one page after the other, over and over."""

    region: float
    rate: float
    """Bytes in a second; none of them twice before the whole region is through."""
    active: Callable[[float], bool] = lambda _at: True
    """At what times, seconds since the migration began."""


def steady(rate: float) -> Callable[[float], float]:
    """A link that carries that many bytes in a second, always."""
    return lambda _at: rate


@dataclass(kw_only=True)
class Machine:
    """One guest's QEMU, on the source. Times are seconds since its migration began."""

    memory: int = 1 * GIB
    in_use: float | None = None
    """Bytes that are not zero; None: all. Zeros cost nothing to send."""
    writers: Sequence[Writer] = ()
    link: Callable[[float], float] = field(default_factory=lambda: steady(100.0 * MIB))
    max_downtime: float = 0.3
    setup: float = 0.1
    earlier_passes: int = 0
    """What a cancelled job left in the counter."""
    live: bool = True

    limit: float | None = None
    throttle: AutoConverge | None = None
    at: float = 0.0
    phase: JobPhase = JobPhase.SETUP
    halted: bool = False
    done: bool = False
    passes: int = 0
    remaining: float = 0.0
    transferred: float = 0.0
    bandwidth: float = 0.0
    dirty_rate: float | None = None
    taken: int = 0
    """Per cent of CPU time that the throttle takes."""
    stopped_at: float | None = None
    _dirtied: list[float] = field(default_factory=list)
    _pass_began: float = 0.0
    _pass_sent: float = 0.0
    _high: int = 0

    def advance(self, until: float) -> None:
        """Let time pass."""
        while not self.done and self.at < until - 1e-9:
            step = min(STEP, until - self.at)
            self._step(step)
            self.at += step

    def sample(self, at: float) -> JobSample:
        """What libvirt would say; `at` is the reader's clock."""
        phase = self.phase
        if phase is JobPhase.PRE_COPY and (self.halted or not self.live):
            phase = JobPhase.SWITCHOVER  # libvirt says so of any guest that stands still
        return JobSample(
            at=Seconds(at), phase=phase, iteration=self.earlier_passes + self.passes,
            remaining=Bytes(round(self.remaining)),
            total=Bytes(self.memory if self.phase is not JobPhase.SETUP else 0),
            transferred=Bytes(round(self.transferred)),
            bandwidth=BytesPerSecond(round(self.bandwidth)),
            dirty_rate=None if self.dirty_rate is None else BytesPerSecond(round(self.dirty_rate)),
            expected_downtime=None, throttle=self.taken,
        )  # fmt: skip

    def switch(self) -> None:
        """Go over to post-copy: the pages dirtied since the last reading are missing as well."""
        self.remaining = self._union(self.remaining)
        self.phase = JobPhase.POST_COPY

    def halt(self) -> None:
        self.halted = True

    def rate(self) -> float:
        """What the link would carry now."""
        rate = self.link(self.at)
        return rate if self.limit is None else min(rate, self.limit)

    def _step(self, step: float) -> None:
        if self.phase is JobPhase.SETUP:
            if self.at >= self.setup - 1e-9:
                self._begin_pass(self.memory)
            return
        self._send(step)
        if self.phase is JobPhase.PRE_COPY and not self.halted and self.live:
            for index, writer in enumerate(self.writers):
                if writer.active(self.at):
                    self._dirtied[index] += writer.rate * (1 - self.taken / 100) * step
        if self.phase is not JobPhase.PRE_COPY:
            self.done = self.remaining <= 0
        elif self.remaining <= self._at_once():
            self._read_bitmap()

    def _send(self, step: float) -> None:
        rate = self.rate()
        if rate > 0:
            self.bandwidth = rate  # QEMU's thread hangs in a dead link and measures nothing
        zeros = self.memory / (self.in_use or self.memory) if self.passes <= 1 else 1.0
        gone = min(self.remaining, rate * step * zeros)
        self.remaining -= gone
        self.transferred += gone / zeros
        self._pass_sent += gone / zeros

    def _at_once(self) -> float:
        return self.bandwidth * self.max_downtime

    def _union(self, left: float) -> float:
        """What is left and what was dirtied since; pages that are among both count once."""
        pairs = zip(self.writers, self._dirtied, strict=True)
        dirty = sum(min(writer.region, dirtied) for writer, dirtied in pairs)
        among = sum(writer.region for writer in self.writers) if self.passes > 1 else self.memory
        return left + dirty * max(0.0, 1 - left / among) if among else left

    def _read_bitmap(self) -> None:
        left = self._union(self.remaining)
        lasted = max(STEP, self.at - self._pass_began)
        self.dirty_rate = (left - self.remaining) / lasted
        self._slow_down(left - self.remaining)
        if left <= self._at_once() or self.halted or not self.live:
            self.remaining, self.phase, self.stopped_at = left, JobPhase.SWITCHOVER, self.at
        else:
            self._begin_pass(left)

    def _begin_pass(self, size: float) -> None:
        self.phase, self.remaining, self.passes = JobPhase.PRE_COPY, float(size), self.passes + 1
        self._dirtied = [0.0 for _ in self.writers]
        self._pass_began, self._pass_sent = self.at, 0.0

    def _slow_down(self, dirtied: float) -> None:
        """QEMU's auto-converge: two passes that leave more than half of what they sent."""
        if self.throttle is None or dirtied <= 0.5 * self._pass_sent:
            return
        self._high += 1
        if self._high >= 2:
            self._high = 0
            more = self.taken + self.throttle.increment if self.taken else self.throttle.initial
            self.taken = min(more, self.throttle.at_most)


def copy(machine: Machine) -> Machine:
    """One of the same kind that has not begun."""
    return dataclasses.replace(machine, _dirtied=[])
