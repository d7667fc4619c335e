"""Simulate a migration in advance: QEMU's passes, and the actions of the policy's rules. Pure.

QEMU 7.2's loop (migration.c, migration_iteration_run; ram.c, ram_save_iterate) sends pages in
slices of 50 ms, or of 100 ms under a bandwidth limit. When the rest is less than the bandwidth
times the downtime limit, QEMU reads the dirty bitmap. If the rest is still less, including the
pages dirtied since, the guest is paused and the rest is sent; otherwise the next pass begins. So a
pass is never shorter than a slice, and the rest at the switchover is close to the limit. The
bandwidth is unknown for the first 100 ms. Zero pages cost almost nothing, but count as remaining.

The rules are evaluated by the same `decide` that the engine uses.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.run.actions import (
    Abort,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    SetXbzrleCache,
    SwitchToPostcopy,
    says,
)
from vmckpt.migration.run.decide import AppliedActions, RunTerms, Verdict, decide
from vmckpt.migration.run.progress import UNKNOWN, PassHistory, seen
from vmckpt.model.migration import AutoConverge, JobPhase, JobSample, Mode
from vmckpt.policy.model import RuleCondition
from vmckpt.units import Bytes, BytesPerSecond, Seconds

SLICE = Seconds(0.05)
"""How long QEMU sends before it checks what is left (ram.c, MAX_WAIT)."""
LIMITED_SLICE = Seconds(0.1)
"""How long QEMU sends before it checks, under a bandwidth limit (qemu-file.c, BUFFER_DELAY)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One set of assumptions about everything that a migration depends on."""

    in_use: float
    """Bytes of pages that are not all zero."""
    memory: float
    curve: DirtyCurve
    """The guest's actual writes."""
    known: DirtyCurve = UNKNOWN
    """The guest's writes as measured before the migration, which the rules use."""
    bandwidth: float
    """Bytes per second in the first pass, in which the target must allocate every page."""
    later_bandwidth: float
    """Bytes per second in later passes: at least `bandwidth`, more if the link is not the limit."""
    postcopy_bandwidth: float
    setup: float
    """Seconds from the order to the first pass."""
    backlog: float
    """Bytes buffered in sockets: QEMU counts them as sent, but the paused guest waits for them."""
    stop: float
    """Seconds of a switchover in addition to sending: device state, libvirt's handshake."""
    overshoot: float = 0.5
    """How far into its last slice the first pass gets before QEMU checks, 0 to 1."""
    tail: tuple[tuple[float, float], ...] = ()
    """Pairs (bytes from the end of memory, how many of these are in use), ascending; empty:
    unknown.
    """
    stopping: float = 0.0
    """Seconds from an abort until the guest is confirmed to have stayed on the source."""
    slice_: float = SLICE
    zero_scan: float = 0.0
    """Seconds for scanning zero pages."""
    differences: float = 1.0
    """Share of a resent page that XBZRLE sends, 0 to 1."""
    faults: float = 1.0
    """Factor by which the rest takes longer in post-copy than in one stream."""
    waits: float = 10.0
    """Pages that a guest in post-copy waits for, one after the other, before it responds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An action that the policy would take."""

    at: Seconds
    """Time from the order to the action."""
    action: str
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The result of a simulated migration."""

    completed: bool
    total: Seconds
    """Time from the order to the end; infinite if the migration never ends."""
    downtime: Seconds | None
    """The downtime; None if the guest was not moved.

    In post-copy, the time until the guest responds, not until it runs.
    """
    sent: float
    """Bytes sent."""
    passes: int
    switched: bool = False
    """Whether the migration completed by post-copy."""
    planned: tuple[Planned, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A running migration, from which the simulation continues."""

    track: PassHistory
    done: AppliedActions
    now: Seconds
    """The time now, on the track's clock."""
    left: float
    """Bytes that are left in the current pass."""
    sent: float
    verdict: Verdict | None = None
    """A decision that has been made but not carried out yet."""


_FIRST_WINDOW = Seconds(0.1)
_MOST_PASSES = 300
# For rules that depend on time, a pass is split into this many steps of at least half a second.
_STEPS, _STEP = 8, 0.5
# After this many consecutive passes of the same size, nothing changes any more.
_STEADY = 4


@dataclass(slots=True)
class _Pass:
    number: int
    size: float
    began: float
    left: float
    until: float
    """The pass is over when this many bytes are left."""
    extra: float = 0.0
    """Seconds before the first byte of the pass."""


@dataclass(slots=True)
class _Throttle:
    """QEMU's auto-converge (ram.c, migration_trigger_throttle)."""

    how: AutoConverge | None = None
    share: float = 0.0
    high: int = 0

    def after_pass(self, dirtied: float, sent: float) -> None:
        """Count a pass that leaves more than half of what it sent; every second such pass throttles
        the guest further."""
        if self.how is None or dirtied <= 0.5 * sent:
            return
        self.high += 1
        if self.high >= 2:
            self.high = 0
            first = self.share == 0
            more = self.how.initial if first else self.share * 100 + self.how.increment
            self.share = min(more, self.how.at_most) / 100


@dataclass(slots=True)
class _Run:
    world: World
    terms: RunTerms
    now: float
    track: PassHistory
    done: AppliedActions
    sent: float = 0.0
    compressed: bool = False
    throttle: _Throttle = field(default_factory=_Throttle)
    planned: list[Planned] = field(default_factory=list)
    steady: int = 0

    # --- the loop ----------------------------------------------------------------------------

    def play(self, one: _Pass) -> Simulated:
        while True:
            acted = len(self.planned)
            ended = self._through(one)
            if ended is not None:
                return ended
            dirtied = self._dirtied(self.now - one.began)
            self.throttle.after_pass(dirtied, one.size - one.left)
            following = self._joined(one.left, dirtied)
            if following < self._at_once(one.number):
                return self._switchover(following, one.number)
            self._count_steady(one, following, acted)
            if self.steady >= _STEADY or one.number >= _MOST_PASSES:
                return self._for_ever(one.number)
            one = self._next(one.number + 1, following)

    def _through(self, one: _Pass) -> Simulated | None:
        """Run one pass and evaluate the rules meanwhile. Returns the result if the migration
        ended."""
        steps = _STEPS if self._timed() else 1
        self.now += one.extra
        lasts = max(0.0, one.left - one.until) / self._rate(one.number)
        step = max(_STEP, lasts / steps) if steps > 1 else lasts
        while True:
            verdict = self._ask(one)
            if verdict is not None:
                ended = self.act(verdict, one)
                if ended is not None:
                    return ended
                one.until = min(one.until, one.left) if one.number == 1 else self.until(one.left)
            rest = max(0.0, one.left - one.until) / self._rate(one.number)
            if rest <= 0:
                return None
            took = min(rest, step, self._to_limit())
            one.left = max(one.until, one.left - took * self._rate(one.number))
            self.sent += took * self._wire(one.number)
            self.now += took

    def _to_limit(self) -> float:
        """Return the seconds until the time limit, which no step exceeds by much; or infinity."""
        if self.terms.time_limit is None:
            return math.inf
        return max(0.01, self.track.began + self.terms.time_limit - self.now)

    def _timed(self) -> bool:
        return any(_by_time(rule.when) for rule in self.terms.policy.rules)

    def _count_steady(self, one: _Pass, following: float, acted: int) -> None:
        """Count consecutive passes in which nothing changes and nothing is done.

        `following`: bytes of the next pass; `acted`: number of planned actions before this pass.
        """
        same = abs(following - one.size) <= 0.002 * one.size and len(self.planned) == acted
        self.steady = self.steady + 1 if same and not self._timed() else 0

    # --- QEMU --------------------------------------------------------------------------------

    def _rate(self, number: int) -> float:
        """Return the bytes of pages processed per second; with XBZRLE, fewer bytes are sent."""
        factor = self.world.differences if self.compressed and number > 1 else 1.0
        return self._wire(number) / factor

    def _wire(self, number: int) -> float:
        """Return the bytes on the wire per second."""
        return self.world.bandwidth if number == 1 else self.world.later_bandwidth

    def _at_once(self, number: int) -> float:
        """Return the bytes that QEMU expects to send within the downtime limit in pass `number`."""
        return self._wire(number) * self.done.max_downtime

    def until(self, size: float) -> float:
        """Return the bytes that a later pass leaves: QEMU sends full slices until the limit is
        met."""
        each = self.world.slice_ * self._rate(2)
        slices = max(1, math.ceil((size - self._at_once(2)) / each))
        return max(0.0, size - slices * each)

    def _next(self, number: int, size: float) -> _Pass:
        return _Pass(number, size, self.now, size, self.until(size))

    def _dirtied(self, time: float) -> float:
        return self.world.curve.within(time * (1 - self.throttle.share))

    def _joined(self, left: float, dirtied: float) -> float:
        """Return the bytes of the pages that remain or were dirtied, each page counted once.

        `left` and `dirtied` are bytes. The overlap is estimated.
        """
        written = max((u for _, u in self.world.curve.points), default=0.0)
        both = max(left, dirtied, written)
        return left + dirtied - (left * dirtied / both if both else 0.0)

    def _ask(self, one: _Pass) -> Verdict | None:
        sample = JobSample(
            at=Seconds(self.now),
            phase=JobPhase.PRE_COPY,
            iteration=one.number,
            remaining=Bytes(round(one.left)),
            total=Bytes(round(self.world.memory)),
            # At least one byte: a link that has carried nothing yet counts as silent.
            transferred=Bytes(round(self.sent) + 1),
            bandwidth=BytesPerSecond(max(1, round(self._wire(one.number)))),
            dirty_rate=None,
            expected_downtime=None,
            throttle=round(self.throttle.share * 100),
        )
        self.track = seen(self.track, sample, self.terms.policy.stall)
        verdict, self.done = decide(
            self.terms, self.track, self.done, now=Seconds(self.now), operator_stops=False
        )
        if verdict is not None:
            self.planned.append(planned(verdict, Seconds(self.now - self.track.began)))
        return verdict

    def act(self, verdict: Verdict, one: _Pass) -> Simulated | None:
        """Apply a verdict. Returns the result if the verdict ends the migration, otherwise None."""
        match verdict.action:
            case SetDowntime() | LimitBandwidth():
                return None
            case SetThrottle(how):
                self.throttle.how = how
                return None
            case SetXbzrleCache():
                self.compressed = True
                return None
            case SwitchToPostcopy():
                return self._post_copy(one)
            case PauseGuest():
                rest = self._joined(one.left, self._dirtied(self.now - one.began))
                return self._switchover(rest, one.number)
            case Abort():
                self.now += self.world.stopping
                return self._ended(completed=False, downtime=None, passes=one.number)

    # --- endings -----------------------------------------------------------------------------

    def _switchover(self, rest: float, passes: int) -> Simulated:
        world = self.world
        # These pages were sent before, except the pages that the first pass had left.
        rate, wire = self._rate(passes), self._wire(passes)
        downtime = rest / rate + world.backlog / wire + world.stop
        self.sent += rest * wire / rate
        self.now += downtime
        return self._ended(completed=True, downtime=Seconds(downtime), passes=passes)

    def standing(self) -> Simulated:
        """Simulate stop-and-copy: the guest is paused from the first byte."""
        world = self.world
        downtime = world.zero_scan + world.in_use / world.bandwidth + world.stop
        self.sent += world.in_use
        self.now += downtime
        return self._ended(completed=True, downtime=Seconds(downtime), passes=1)

    def _post_copy(self, one: _Pass) -> Simulated:
        """Switch to post-copy: the guest runs with the pages that the target has; the rest follows.

        The guest runs again soon, but does not respond before it has the pages that it needs. Each
        page arrives after the data that is already buffered in the sockets.
        """
        world = self.world
        rest = self._joined(one.left, self._dirtied(self.now - one.began))
        stop = world.backlog / world.bandwidth + world.stop
        copying = world.faults * rest / world.postcopy_bandwidth
        each = world.backlog / world.postcopy_bandwidth
        downtime = stop + min(copying, world.waits * each)
        self.sent += rest
        self.now += stop + copying
        done = self._ended(completed=True, downtime=Seconds(downtime), passes=one.number)
        return replace(done, switched=True)

    def _for_ever(self, passes: int) -> Simulated:
        """Continue without a change until the time limit, or forever if there is no limit."""
        limit = self.terms.time_limit
        end = math.inf if limit is None else self.track.began + limit
        self.sent += max(0.0, end - self.now) * self._wire(passes)
        self.now = max(self.now, end) + self.world.stopping
        return self._ended(completed=False, downtime=None, passes=passes)

    def _ended(self, *, completed: bool, downtime: Seconds | None, passes: int) -> Simulated:
        return Simulated(
            completed=completed,
            total=Seconds(self.now - self.track.began),
            downtime=downtime,
            sent=self.sent,
            passes=passes,
            planned=tuple(self.planned),
        )


def _by_time(when: RuleCondition) -> bool:
    """Return whether a rule may begin to hold in the middle of a pass."""
    given = (
        when.stalled_for, when.time_used, when.time_share, when.remaining_above,
        when.remaining_below, when.lowest_cost,
    )  # fmt: skip
    return any(one is not None for one in given)


def planned(verdict: Verdict, at: Seconds) -> Planned:
    """Return a verdict in the form that a plan shows."""
    return Planned(
        at=Seconds(round(at, 3)),
        action=says(verdict.action),
        rule=verdict.rule,
        reason=verdict.reason,
    )


def simulate(world: World, terms: RunTerms, start: Start | None = None) -> Simulated:
    """Simulate a migration from the order, or from `start`."""
    if start is not None:
        run = _Run(world, terms, start.now, start.track, start.done, start.sent)
        if start.track.passes:
            here = start.track.passes[-1]
            until = _first_leaves(world, terms) if here.number == 1 else run.until(start.left)
            one = _Pass(here.number, here.size, here.began, start.left, min(until, start.left))
            ended = None if start.verdict is None else run.act(start.verdict, one)
            return ended if ended is not None else run.play(one)
    else:
        track, done = (
            PassHistory(began=Seconds(0.0), curve=world.known),
            AppliedActions(max_downtime=terms.max_downtime),
        )
        run = _Run(world, terms, world.setup, track, done)
    return run.standing() if terms.mode is Mode.STOP_AND_COPY else run.play(_first(run))


def _first(run: _Run) -> _Pass:
    """Return the first pass, which sends all memory in use, in the order of its addresses."""
    world = run.world
    leaves = _first_leaves(world, run.terms)
    # Sockets accept their backlog immediately; its sending time is counted at the switchover.
    swallowed = min(world.backlog, max(0.0, world.in_use - leaves))
    run.sent += swallowed
    left = world.in_use - swallowed
    return _Pass(1, world.in_use, run.now, left, min(leaves, left), extra=world.zero_scan)


def _first_leaves(world: World, terms: RunTerms) -> float:
    """Return the bytes in use that are left at the end of the first pass."""
    at_once = min(world.memory, world.bandwidth * terms.max_downtime)
    end = in_last(world, at_once)
    end = min(end, max(0.0, world.in_use - _FIRST_WINDOW * world.bandwidth))
    return max(0.0, end - world.overshoot * world.slice_ * world.bandwidth)


def in_last(world: World, distance: float) -> float:
    """Return the bytes in use among the last `distance` bytes of memory.

    The position of these bytes is often unknown; `overshoot` then covers this uncertainty, too.
    """
    if not world.tail:
        return min(world.in_use, distance) * (1 - world.overshoot)
    for (d0, u0), (d1, u1) in pairwise([(0.0, 0.0), *world.tail]):
        if distance <= d1:
            return u0 + (u1 - u0) * (distance - d0) / (d1 - d0)
    return world.tail[-1][1]
