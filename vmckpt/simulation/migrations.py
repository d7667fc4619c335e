"""Simulated migrations, as functions of time. Pure.

A migration is computed when it begins, and again when it receives a request: passes over memory,
the guest's writes, and the reactions of its policy. After that, its state at any time is known
without computing earlier states.
"""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.journal import records
from vmckpt.journal.jobs import JobDetail, JobView
from vmckpt.journal.records import RequestKind, StoredEvent, StoredSample
from vmckpt.journal.serialization import as_record, plain
from vmckpt.migration import report
from vmckpt.migration.forecast import choose_mode
from vmckpt.migration.forecast.forecast import Facts, Forecast, Range
from vmckpt.migration.request import PolicyOverrides
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    Stop,
    SwitchToPostcopy,
    says,
)
from vmckpt.migration.run.operator_requests import NO_WAY_BACK
from vmckpt.migration.run.progress import estimate
from vmckpt.model.events import Checked, Decided, Event, PhaseChanged, Sampled
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import GuestNow
from vmckpt.model.migration import (
    AutoConverge,
    Decision,
    DirtyPoint,
    Driver,
    JobPhase,
    JobSample,
    JobTotals,
    Mode,
    Outcome,
)
from vmckpt.simulation.fleet import WHO, Manner, operation, over
from vmckpt.units import Bytes, BytesPerSecond, Seconds, show_bytes, show_seconds

INTERVAL = Seconds(0.2)
_PREFLIGHT, _SETUP, _STOP, _CLEANUP, _ABORTS = 0.9, 0.4, 0.03, 0.3, 0.4
_BEGINS = _PREFLIGHT + _SETUP
_IN_VAIN, _MOST_PASSES = Seconds(60.0), 200
_LOW = 0.96  # a pass is better if it begins with less than this share of the best pass
_NOTHING = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class Move:
    """The order to migrate a guest."""

    id: str
    guest: GuestNow
    target: str
    manner: Manner
    began: float
    part_of: str | None = None
    asked: tuple[tuple[float, Action], ...] = ()
    """Requested actions, each with its time in seconds since the migration began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of a migration in which all rates are constant."""

    phase: JobPhase
    iteration: int
    begins: Seconds
    left: float
    sent: float
    rate: float
    dirty: float | None
    throttle: int
    max_downtime: Seconds


class SimulatedPasses:
    """A migration from its order to its end. Times are in seconds since the order."""

    def __init__(self, move: Move) -> None:
        dice = random.Random(f"{move.id} {move.guest.name}")
        self.move, self._manner = move, move.manner
        self._in_use = move.guest.memory * dice.uniform(0.55, 0.9)
        self._link = self._manner.bandwidth(self._in_use, dice)
        self._hot = self._in_use * dice.uniform(*self._manner.hot)
        self._writes = self._link * dice.uniform(*self._manner.writes)
        self._max_downtime, self._limit = self._manner.max_downtime, math.inf
        self._now = self._left = self.sent = self._pass_began = 0.0
        self._iteration = self._throttle = 0
        self._slow = AutoConverge(initial=0, increment=0, at_most=0)
        self._dirty: float | None = None
        self._best, self._stalled_at, self._fired = math.inf, math.inf, False
        self.legs: list[Leg] = []
        self.passes: list[Leg] = []
        """The first leg of each pass over memory."""
        self.events: list[tuple[float, Event]] = []
        self.downtime: Seconds | None = None
        self.switched: float | None = None
        self.outcome = Outcome.COMPLETED
        self.report: dict[str, Any] | None = None  # filled in on demand
        self._play()

    def _play(self) -> None:
        asked = list(self.move.asked)
        self._enter(JobPhase.PREFLIGHT, _PREFLIGHT)
        room = f"{show_bytes(self.move.guest.memory)} fits into the free memory there"
        where = self.move.target
        self.findings = (Finding(code="memory", severity=Severity.OK, where=where, text=room),)
        self._tell(Checked(findings=self.findings))
        self._enter(JobPhase.SETUP, _SETUP)
        self._enter(JobPhase.PRE_COPY)
        self._pass(self._in_use)
        while self._phase in (JobPhase.PRE_COPY, JobPhase.POST_COPY, JobPhase.PAUSED):
            ends = self._now + self._left / self._rate
            if asked and asked[0][0] < ends:
                at, action = asked.pop(0)
                self._until(max(at, self._now))
                self._do(action, f"requested by {WHO}", "operator")
            else:
                self._until(ends)
                self._pass_over()
        self.over = self._now
        """Time at which the last data was sent."""
        self._enter(JobPhase.CLEANUP, _CLEANUP)
        self._enter(JobPhase.DONE)
        self.ends = self._now

    @property
    def _rate(self) -> float:
        return min(self._link, self._limit)

    def _tell(self, event: Event) -> None:
        self.events.append((self._now, event))

    def _enter(self, phase: JobPhase, lasts: float = 0.0) -> None:
        self._phase = phase
        self._tell(PhaseChanged(phase=phase))
        self._now += lasts

    def _until(self, then: float) -> None:
        rate = 0.0 if self._phase is JobPhase.CANCELLING else self._rate
        leg = Leg(
            phase=self._phase, iteration=self._iteration, begins=Seconds(self._now), rate=rate,
            left=self._left, sent=self.sent, dirty=self._dirty, throttle=self._throttle,
            max_downtime=self._max_downtime,
        )  # fmt: skip
        self.legs.append(leg)
        if leg.iteration > len(self.passes):
            self.passes.append(leg)
        gone = min(self._left, rate * (then - self._now))
        self._left, self.sent, self._now = self._left - gone, self.sent + gone, then

    def written(self, lasts: float) -> float:
        """Return the bytes that the guest dirties in `lasts` seconds; a page counts once."""
        return self._hot * (1 - math.exp(-self._writes * lasts / self._hot))

    def _dirtied(self) -> float:
        """Return the bytes that the guest has dirtied in this pass, at its current throttle."""
        return self.written((1 - self._throttle / 100) * (self._now - self._pass_began))

    def _pass(self, size: float) -> None:
        self._iteration += 1
        self._left, self._pass_began = size, self._now
        better = size < self._best * _LOW
        self._best = size if better else self._best
        self._stalled_at = math.inf if better else min(self._stalled_at, self._now)

    def _pass_over(self) -> None:
        if self._phase is JobPhase.POST_COPY:  # the guest is already running on the target
            self._phase = JobPhase.SWITCHOVER
            return
        dirtied, lasted = self._dirtied(), max(0.01, self._now - self._pass_began)
        if self._phase is JobPhase.PAUSED or dirtied <= self._rate * self._max_downtime:
            self._switchover(0.0 if self._phase is JobPhase.PAUSED else dirtied)
            return
        self._dirty = dirtied / lasted
        if dirtied > 0.5 * self._rate * lasted:
            more = self._slow.increment if self._throttle else self._slow.initial
            self._throttle = min(self._slow.at_most, self._throttle + more)
        self._pass(dirtied)
        stood, manner = self._now - self._stalled_at, self._manner
        why = f"there was no progress for {show_seconds(max(0.0, stood))}"
        if not self._fired and stood >= manner.patience:
            self._fired = True
            self._do(manner.stalled, why, manner.rule)
        elif stood >= _IN_VAIN or self._iteration > _MOST_PASSES:
            self._do(Abort(Stop.RULE), why, "does not converge")

    def _do(self, action: Action, reason: str, rule: str) -> None:
        decision = Decision(
            at=Seconds(self._now), action=says(action), reason=reason, rule=rule,
            numbers=self._numbers(),
        )  # fmt: skip
        self._tell(Decided(decision=decision))
        match action:
            case LimitBandwidth(rate):
                self._limit = math.inf if rate is None else float(rate)
            case SetDowntime(limit):
                self._max_downtime = limit
            case SetThrottle(how):
                self._slow = how
            case SwitchToPostcopy() | PauseGuest():
                self._left = min(self._in_use, self._left + self._dirtied() / 2)
                switches = isinstance(action, SwitchToPostcopy)
                self.switched = self._now if switches else None
                self.downtime = None if switches else Seconds(self._left / self._rate)
                self._enter(JobPhase.POST_COPY if switches else JobPhase.PAUSED)
            case Abort(stop):
                self.outcome = Outcome.CANCELLED if stop is Stop.OPERATOR else Outcome.NOT_CONVERGED
                self._enter(JobPhase.CANCELLING)
                self._until(self._now + _ABORTS)
            case _:
                pass  # compression is not simulated

    def _numbers(self) -> dict[str, float | int | str | None]:
        """Return the numbers that the real controller records with a decision."""
        dirty = self._dirty
        return {
            "elapsed_s": round(self._now - _PREFLIGHT, 3), "iteration": self._iteration,
            "remaining": round(self._left), "bandwidth": round(self._rate),
            "dirty_rate": None if dirty is None else round(dirty),
            "dirty_over_bandwidth": None if dirty is None else round(dirty / self._rate, 3),
            "expected_downtime_ms": round(self._left / self._rate * 1000, 1),
            "max_downtime_ms": round(self._max_downtime * 1000, 1),
            "precopy_excess": "endless" if self._stalled_at < math.inf else None,
        }  # fmt: skip

    def _switchover(self, rest: float) -> None:
        """Pause the guest until its remaining memory has arrived. `rest`: the size, in bytes."""
        self._enter(JobPhase.SWITCHOVER)
        self._left, lasts = rest, rest / self._rate + _STOP
        self.downtime = Seconds((self.downtime or 0.0) + lasts)
        self._until(self._now + lasts)


@dataclass(frozen=True, slots=True)
class Made:
    """A migration with its entire future course, which only further requests can change."""

    move: Move
    course: SimulatedPasses
    facts: Facts
    forecast: Forecast
    marks: tuple[tuple[float, float, float], ...]
    """Time, share done by then, and expected end: at the start and after each request. A request
    may change the end, but the share that is done never decreases."""
    requests: tuple[records.Request, ...] = ()

    @property
    def ends(self) -> float:
        return self.move.began + self.course.ends

    def sampled(self, at: float) -> Sampled:
        """Return the state `at` seconds after the order."""
        legs = self.course.legs
        leg = legs[max(0, bisect_right(legs, at, key=lambda one: one.begins) - 1)]
        gone = min(leg.left, leg.rate * (at - leg.begins))
        rest, waves = leg.left - gone, 1 + 0.02 * math.sin(5 * at) + 0.01 * math.sin(11.3 * at)
        sample = JobSample(
            at=Seconds(at), phase=leg.phase, iteration=leg.iteration, remaining=Bytes(round(rest)),
            total=self.move.guest.memory, transferred=Bytes(round(leg.sent + gone)),
            bandwidth=BytesPerSecond(round(leg.rate * waves)),
            dirty_rate=None if leg.dirty is None else BytesPerSecond(round(leg.dirty)),
            expected_downtime=Seconds(rest / leg.rate) if leg.dirty and leg.rate else None,
            throttle=leg.throttle,
        )  # fmt: skip
        began = [
            replace(sample, at=p.begins, iteration=p.iteration, remaining=Bytes(round(p.left)))
            for p in self.course.passes[max(0, leg.iteration - 3) : leg.iteration]
        ]
        since, share, until = next(one for one in reversed(self.marks) if one[0] <= at)
        done = share + (1 - share) * (at - since) / max(0.1, until - since)
        guess = estimate([*began, sample], leg.max_downtime)
        return Sampled(sample=sample, estimate=guess, done=min(1.0, done))

    def samples(self, now: float, after: int = 0) -> list[StoredSample]:
        """Return the samples up to `now` whose number is above `after`.

        If `after` is negative, only the last sample is returned.
        """
        passed = min(now - self.move.began, self.course.over) - _BEGINS
        count = 0 if passed < 0 else 1 + int(passed / INTERVAL + 1e-6)
        found = []
        for number in range(after if after >= 0 else max(0, count - 1), count):
            at = Seconds(round(_BEGINS + number * INTERVAL, 3))
            values = as_record(self.sampled(at), _NOTHING, at).values
            found.append(StoredSample(seq=number + 1, at=at, values=values))
        return found

    def events(self, now: float, after: int = 0) -> list[StoredEvent]:
        """Return the events up to `now` whose number is above `after`."""
        told = [one for one in self.course.events if one[0] <= now - self.move.began]
        stored = [as_record(event, _NOTHING, Seconds(at)) for at, event in told[after:]]
        return [
            StoredEvent(seq=number, at=one.at, kind=one.kind, values=one.values)
            for number, one in enumerate(stored, after + 1)
        ]

    def phase(self, now: float) -> JobPhase:
        told = [one for at, one in self.course.events if at <= now - self.move.began or not at]
        return [one.phase for one in told if isinstance(one, PhaseChanged)][-1]

    def view(self, now: float) -> JobView:
        move, manner = self.move, self.move.manner
        detail = {"observe": False, "wishes": PolicyOverrides().as_json()}
        one = operation(
            move.id, "migrate", move.guest.name, move.began, guest_uuid=move.guest.uuid,
            source=move.guest.host, target=move.target, policy=manner.policy,
            mode=str(manner.mode), phase=str(self.phase(now)),
            detail=detail if move.part_of is None else {**detail, "part_of": move.part_of},
        )  # fmt: skip
        if now >= self.ends:
            self.course.report = self.course.report or self.report()
            return over(one, self.course.outcome, self.ends, self.course.report)
        return JobView(operation=one, attended=True, sample=next(iter(self.samples(now, -1)), None))

    def detail(self, now: float) -> JobDetail:
        made_at = self.move.began + _PREFLIGHT
        told = records.StoredForecast(made_at=made_at, values=self.expected())
        return JobDetail(
            view=self.view(now), forecast=told if now >= made_at else None,
            events=self.events(now), samples=self.samples(now), requests=self.requests,
        )  # fmt: skip

    def expected(self) -> dict[str, Any]:
        """Return the forecast as the journal stores it."""
        told = {"facts": self.facts.as_json(), "mode": str(self.move.manner.mode)}
        return {**told, "expected": self.forecast.as_json()}

    def report(self) -> dict[str, Any]:
        """Return the report as JSON, as `vmckpt migrate` prints it at the end."""
        move, course = self.move, self.course
        took, good = Seconds(course.over - _PREFLIGHT), course.outcome is Outcome.COMPLETED
        sent, downtime = Bytes(round(course.sent)), course.downtime if good else None
        shown = [*(one.begins for one in course.passes), course.over]
        totals = JobTotals(
            total=took, setup=Seconds(_SETUP), downtime=downtime, iterations=len(course.passes),
            transferred=sent,
        )  # fmt: skip
        measured = choose_mode.Measured(completed=good, total=took, downtime=downtime, sent=sent)
        score = choose_mode.score(self.forecast, measured).as_json()
        told = report.MigrationReport(
            guest=move.guest.name, source=move.guest.host, target=move.target, job=move.id,
            outcome=course.outcome, driver=Driver.PEER_TO_PEER, began=Seconds(_PREFLIGHT),
            elapsed=Seconds(course.ends - _PREFLIGHT), observed_downtime=None,
            # As with libvirt 9.0, which keeps no statistics of a post-copy migration.
            totals=totals if good and course.switched is None else None,
            samples=tuple(self.sampled(at).sample for at in shown),
            decisions=tuple(one.decision for _, one in course.events if isinstance(one, Decided)),
            findings=course.findings, policy=move.manner.policy, mode=move.manner.mode,
            switched=None if course.switched is None else Seconds(course.switched),
            forecast={**self.expected(), "score": score},
        )  # fmt: skip
        return {k: v for k, v in plain(report.as_json(told)).items() if k != "samples"}


def simulate(move: Move) -> Made:
    """Simulate a migration, with a forecast that is roughly right."""
    course = SimulatedPasses(move)
    off, mode = random.Random(f"{move.id} forecast").uniform(0.9, 1.12), move.manner.mode

    def around(value: float, share: float) -> Range:
        return Range(value * off * (1 - share), value * off * (1 + share))

    basis, first = ("a simulation: taken from the simulated migration itself",), course.legs[0]
    facts = Facts(
        memory=move.guest.memory, in_use=around(first.left, 0.03), basis=basis,
        dirty=(DirtyPoint(time=Seconds(1.0), dirtied=course.written(1.0), error=1e6),),
        bandwidth=around(first.rate, 0.08), later=around(first.rate, 0.08),
        setup=Range(0.3, 0.6), stop=Range(0.02, 0.06),
    )  # fmt: skip
    forecast = Forecast(
        mode=mode, total=around(course.over - _PREFLIGHT, 0.2), basis=basis,
        downtime=around(course.downtime or 0.09, 0.5), sent=around(course.sent, 0.12),
        converges=True, switches=course.switched is not None, planned=(),
        passes=Range(max(1, len(course.passes) - 2), len(course.passes) + 2),
    )  # fmt: skip
    return Made(move, course, facts, forecast, ((0.0, 0.0, course.over),))


def ask(made: Made, now: float, kind: RequestKind, action: Action) -> Made:
    """Apply a request, which changes the course from now on.

    Raises BadInput if the migration refuses the request.
    """
    at, move = now - made.move.began, made.move
    if (why := _refusal(made.phase(now), move.manner.mode, action)) is not None:
        raise BadInput(f"{move.id} refused {kind}: {why}")
    done = made.sampled(at).done if at > _BEGINS else 0.0
    move = replace(move, asked=(*move.asked, (at, action)))
    course = SimulatedPasses(move)
    request = records.Request(
        id=len(made.requests) + 1, operation=move.id, kind=kind, arguments={}, asked_by=WHO,
        asked_at=now, taken_at=now, answered_at=now, ok=True, answer=says(action),
    )  # fmt: skip
    marks, requests = (*made.marks, (at, done, course.over)), (*made.requests, request)
    return Made(move, course, made.facts, made.forecast, marks, requests)


def _refusal(phase: JobPhase, mode: Mode, action: Action) -> str | None:
    """Return why a request is refused, as migration.run.operator_requests does, or None."""
    if phase is JobPhase.POST_COPY:
        return None if isinstance(action, LimitBandwidth) else NO_WAY_BACK
    if phase in (JobPhase.SWITCHOVER, JobPhase.CANCELLING, JobPhase.CLEANUP, JobPhase.DONE):
        return (
            "the migration is being stopped"
            if phase is JobPhase.CANCELLING
            else "the migration is about to end"
        )
    if isinstance(action, SwitchToPostcopy) and not mode.may_switch_early:
        return f"this migration cannot switch to post-copy: it was started in mode {mode}"
    if isinstance(action, SwitchToPostcopy | PauseGuest) and phase is not JobPhase.PRE_COPY:
        moves = phase is JobPhase.PAUSED
        return "the guest is already paused" if moves else "no memory is being sent yet"
    return None
