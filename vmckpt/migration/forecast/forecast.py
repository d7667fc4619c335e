"""Forecast a migration as ranges, and record the basis of the ranges. Pure.

Every fact is a range. The migration is simulated (`simulator`) at the corners of all ranges, where
each fact has its best or worst value, and once in the middle. The forecast is the hull of the
results. A range should include the measured value nine times out of ten.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from vmckpt.migration import request as contract
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.forecast.simulator import (
    LIMITED_SLICE,
    SLICE,
    Planned,
    Simulated,
    World,
    simulate,
)
from vmckpt.migration.run.progress import UNKNOWN
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint, LinkSeen, Mode
from vmckpt.policy.model import Policy
from vmckpt.units import MIB, Bytes, show_bytes, show_rate, show_seconds

# A guest's writes vary from moment to moment. Measured in the lab with steady writers: long passes
# found 0.97 to 1.03 times as much dirty memory as the probe's curve predicts.
DIRTY_MODEL = 0.04
# After the last measurement, a guest may dirty only pages already counted, or keep dirtying new
# pages for this long. In seconds.
_FAR = 3600.0
# The slope at the end of a count is measured from the last point before this share of its time.
_ENDS = 2 / 3
# Linux lets a socket grow to 4 MiB (tcp_wmem), of which about half is payload. Measured: 2 MiB.
BACKLOG = (1.0 * MIB, 3.0 * MIB)
# Zero pages are scanned at the speed of memory.
_ZERO_SCAN = (8 << 30, 2 << 30)
# Post-copy sends pages a little slower than a single stream (measured: factor 1.02 to 1.12), and a
# guest waits for this many pages, one after the other, before it responds (measured: 10 to 20).
_FAULTS, _WAITS = (1.0, 1.15), (6.0, 24.0)
# Seconds for a late sample, the end of the job and a query of both hosts. Measured: 0.3 s.
_STOPPING = (0.0, 1.0)
# The share of a rewritten page that XBZRLE sends depends on the data: from almost none to all.
_DIFFERENCES = (0.2, 1.0)


@dataclass(frozen=True, slots=True)
class Range:
    """A range from the lowest to the highest expected value."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def width(self) -> float:
        """Half the width, as a share of the middle: 0.3 is "within 30 %"; infinite if unbounded."""
        if math.isinf(self.high):
            return math.inf
        return 0.0 if self.high <= 0 else (self.high - self.low) / (self.high + self.low)

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high

    def at_most(self, bound: float | None) -> "Range":
        """Return the range cut off at `bound`; None: no bound."""
        if bound is None:
            return self
        return Range(min(self.low, bound), min(self.high, bound))

    def at(self, share: float) -> float:
        """Return the value at `share`: 0 is the low end, 1 the high end."""
        return self.low + share * (self.high - self.low)

    def show(self, shown: Callable[[float], str]) -> str:
        """Return the range as text, such as "4.1 s to 5.0 s"."""
        if math.isinf(self.high):
            return f"{shown(self.low)} or more"
        low, high = shown(self.low), shown(self.high)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known before the migration."""

    memory: Bytes
    """Memory of the guest."""
    in_use: Range
    """Bytes that the first pass sends."""
    dirty: tuple[DirtyPoint, ...]
    """Measured points of the dirtying curve; empty if it was not measured."""
    bandwidth: Range
    """Bytes per second in the first pass, without the policy's limit."""
    later: Range
    """Bytes per second in later passes, once the target has allocated every page."""
    setup: Range
    """Seconds from the order to the first byte."""
    stop: Range
    """Seconds that a switchover takes in addition to sending."""
    backlog: Range = Range(*BACKLOG)
    """Bytes that are buffered in sockets."""
    tail: tuple[tuple[float, float], ...] = ()
    """Pairs (bytes from the end of memory, how many of these are in use); empty: unknown."""
    known: bool = True
    """Whether the bandwidth was measured, or is certain to reach the policy's limit."""
    link: LinkSeen | None = None
    """Throughput of the probe's own connection; None if it was not measured."""
    disks: Bytes = Bytes(0)
    """Bytes of disks that are copied before memory."""
    basis: tuple[str, ...] = ()
    """Where these facts come from, in words."""

    def curve(self, share: float) -> DirtyCurve:
        """Return a possible dirtying curve: the lowest for `share` 0, the highest for 1."""
        if not self.dirty:
            # Unknown: between no writes and all memory within a second.
            return DirtyCurve(
                ((1.0, share * self.in_use.high),), float(self.memory), self.in_use.at(share)
            )
        sign = 2 * share - 1
        points = [
            (one.time, max(0.0, one.dirtied * (1 + sign * DIRTY_MODEL) + sign * one.error))
            for one in sorted(self.dirty, key=lambda one: one.time)
        ]
        last, most = points[-1]
        slope = _last_slope(points)
        # Written pages are in use, so they cannot exceed the memory in use, except for new pages.
        bound = max(most, self.in_use.high + share * (self.memory - self.in_use.high))
        beyond = min(bound, most + share * slope * (_FAR - last))
        reached = last + (beyond - most) / slope if slope > 0 and beyond > most else last + _FAR
        return DirtyCurve(
            (*points, (reached, beyond), (2 * reached, beyond)),
            float(self.memory),
            self.in_use.at(share),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "in_use": _whole(self.in_use),
            "bandwidth": _whole(self.bandwidth),
            "later_bandwidth": _whole(self.later),
            "link": None if self.link is None else self.link.rate,
            "setup_ms": _ms(self.setup),
            "stop_ms": _ms(self.stop),
            "dirty_probes": [
                {
                    "after_ms": round(one.time * 1000, 1),
                    "dirtied": round(one.dirtied),
                    "error": round(one.error),
                }
                for one in self.dirty
            ],
            "basis": list(self.basis),
        }


def _last_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return how steeply the curve rises at its end, at most its mean slope.

    The slope is taken over the last third of the measured time or more, since counts within some
    ten milliseconds vary.
    """
    last, most = points[-1]
    mean = most / last
    before = [one for one in points if one[0] <= _ENDS * last]
    if not before:
        return mean
    time, less = before[-1]
    return min(mean, max(0.0, (most - less) / (last - time)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of a migration in one mode."""

    mode: Mode
    total: Range | None
    """Duration in seconds; None if the migration never ends."""
    downtime: Range | None
    """Downtime in seconds; None if the guest is not moved.

    In post-copy, the time until the guest responds.
    """
    sent: Range | None
    """Bytes sent; None if `total` is None."""
    converges: bool | None
    """Whether the migration completes rather than is aborted or never ends; None if uncertain."""
    switches: bool | None
    """Whether the migration completes by post-copy; None if uncertain."""
    passes: Range
    planned: tuple[Planned, ...]
    """What the policy's rules would do with every fact in the middle of its range."""
    basis: tuple[str, ...]
    known: bool = True
    """Whether the bandwidth is known (see Facts). If not, the high ends of the ranges are only
    defaults for the choice of a mode, and are not shown."""

    def shown(self) -> "Forecast":
        """Return the forecast to show to the operator: without high ends that are unknown."""
        if self.known:
            return self
        return replace(
            self, total=open_ended(self.total), downtime=open_ended(self.downtime),
            sent=open_ended(self.sent),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        told = self.shown()
        return {
            "mode": str(self.mode),
            "total_ms": None if told.total is None else _ms(told.total),
            "downtime_ms": None if told.downtime is None else _ms(told.downtime),
            "bytes": None if told.sent is None else _whole(told.sent),
            "converges": self.converges,
            "switches": self.switches,
            "passes": _whole(self.passes),
            "planned": [planned_json(one) for one in self.planned],
            "basis": list(self.basis),
        }


def planned_json(one: Planned) -> dict[str, Any]:
    """Return a planned action as `--json` prints it."""
    return {
        "at_ms": round(one.at * 1000, 1),
        "action": one.action,
        "rule": one.rule,
        "reason": one.reason,
    }


def open_ended(span: Range | None) -> Range | None:
    """Return the range without its high end, which is unknown; None if there is no range."""
    return None if span is None else Range(span.low, math.inf)


def _ms(span: Range) -> list[float | None]:
    return [None if math.isinf(one) else round(one * 1000, 1) for one in (span.low, span.high)]


def _whole(span: Range) -> list[int | None]:
    return [None if math.isinf(one) else round(one) for one in (span.low, span.high)]


def worlds(facts: Facts, policy: Policy) -> tuple[World, ...]:
    """Return the worlds to simulate: first the middle of all ranges, then their corners.

    Link, guest and first pass vary independently; the minor facts vary with the link.
    """
    limits = policy.limits
    bandwidth = facts.bandwidth.at_most(limits.bandwidth)
    later = facts.later.at_most(limits.bandwidth)
    postcopy = facts.bandwidth.at_most(limits.postcopy_bandwidth)
    zeros = max(0.0, facts.memory - facts.in_use.middle)

    def world(slow: float, busy: float, early: float, held: float) -> World:
        return World(
            in_use=facts.in_use.at(busy),
            memory=float(facts.memory),
            curve=facts.curve(busy),
            known=facts.curve(0.5) if facts.dirty else UNKNOWN,
            bandwidth=max(1.0, bandwidth.at(1 - slow)),
            later_bandwidth=max(1.0, later.at(1 - held)),
            postcopy_bandwidth=max(1.0, postcopy.at(1 - slow)),
            # Disks are copied first, at the bandwidth of the first pass, while the guest runs.
            setup=facts.setup.at(slow) + facts.disks / max(1.0, bandwidth.at(1 - slow)),
            backlog=facts.backlog.at(slow),
            stop=facts.stop.at(slow),
            overshoot=early,
            stopping=Range(*_STOPPING).at(slow),
            tail=facts.tail,
            slice_=SLICE if limits.bandwidth is None else LIMITED_SLICE,
            zero_scan=zeros / Range(_ZERO_SCAN[1], _ZERO_SCAN[0]).at(1 - slow),
            differences=Range(*_DIFFERENCES).at(busy),
            faults=Range(*_FAULTS).at(slow),
            waits=Range(*_WAITS).at(slow),
        )

    corners = [(*corner, corner[0]) for corner in product((0.0, 1.0), repeat=3)]
    if later != bandwidth:
        # The target's kernel slows down the first pass, but not the later passes.
        corners += [(1.0, busy, early, 0.0) for busy, early in product((0.0, 1.0), repeat=2)]
    return (world(0.5, 0.5, 0.5, 0.5), *(world(*corner) for corner in corners))


def forecast(facts: Facts, policy: Policy, mode: Mode, guest: Guest) -> Forecast:
    """Forecast a migration in `mode`.

    `mode`: not AUTO, which `choose_mode.choose` resolves, nor CHECKPOINT, which has no forecast.
    """
    held = contract.terms(policy, mode, guest, facts.disks)
    found = [simulate(one, held) for one in worlds(facts, policy)]
    found = [replace(one, sent=one.sent + facts.disks) for one in found]
    verdicts = {one.completed for one in found}
    switched = {one.switched for one in found if one.completed}
    downtimes = [one.downtime for one in found if one.downtime is not None]
    ends = any(not math.isinf(one.total) for one in found)
    return Forecast(
        mode=mode,
        total=_hull([one.total for one in found]) if ends else None,
        downtime=_hull(downtimes) if downtimes else None,
        sent=_hull([one.sent if math.isfinite(one.total) else math.inf for one in found])
        if ends
        else None,
        converges=verdicts.pop() if len(verdicts) == 1 else None,
        switches=(switched or {False}).pop() if len(switched) <= 1 else None,
        passes=_hull([one.passes for one in found]),
        planned=found[0].planned,
        basis=(*facts.basis, _verdict(found)),
        known=facts.known,
    )


def _hull(values: Sequence[float]) -> Range:
    return Range(min(values), max(values))


def _verdict(found: Sequence[Simulated]) -> str:
    """Return a summary of the simulations' results."""
    done = sum(one.completed for one in found)
    if done == len(found):
        return f"completes in all {done} simulated cases"
    if done == 0:
        return f"completes in none of {len(found)} simulated cases"
    return f"completes in {done} of {len(found)} simulated cases"


def in_words(one: Forecast) -> str:
    """Return the forecast in one line."""
    one = one.shown()
    if one.total is None:
        return f"{one.mode}: never ends"
    words = [f"{one.mode}: {one.total.show(show_seconds)}"]
    if one.downtime is not None:
        words.append(f"downtime {one.downtime.show(show_seconds)}")
    if one.sent is not None:
        words.append(f"sends {one.sent.show(show_bytes)}")
    if one.converges is None:
        words.append("might not complete")
    elif not one.converges:
        words.append("does not complete")
    return ", ".join(words)


def curve_in_words(facts: Facts) -> str:
    """Return the last measured point of the dirtying curve in words."""
    if not facts.dirty:
        return "not measured"
    last = max(facts.dirty, key=lambda one: one.time)
    return (
        f"{show_bytes(last.dirtied)} written within {show_seconds(last.time)}"
        f" ({show_rate(last.dirtied / last.time)})"
    )
