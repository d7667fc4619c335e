"""Replay a recorded migration under another policy.

Recorded samples are valid only while the policy acts as recorded. They are followed to the point
where the policy would have acted differently. From there, a simulation continues, with a world
fitted to the samples up to that point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.migration import request, trace
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.forecast.forecast import BACKLOG, Range, planned_json
from vmckpt.migration.forecast.history import STOP
from vmckpt.migration.forecast.simulator import Planned, Simulated, Start, World, planned, simulate
from vmckpt.migration.run.actions import SwitchToPostcopy, says
from vmckpt.migration.run.decide import AppliedActions, RunTerms, Verdict, decide, time_limit
from vmckpt.migration.run.progress import UNKNOWN, PassHistory, seen
from vmckpt.model.migration import Decision, JobPhase, JobSample, Mode
from vmckpt.policy.model import Policy
from vmckpt.units import Seconds

# An action follows the sample that caused it within this many seconds.
_SOON = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy would have done."""

    decided: tuple[Planned, ...]
    """Actions on the recorded samples, including the first that differs."""
    differs_at: Seconds | None
    """When the policy differs, in seconds since the migration began; None if it would have acted as
    recorded.
    """
    recorded: str | None
    """The action that was recorded at that point; None if there was none."""
    then: Simulated | None
    """The simulated rest of the migration; None if nothing differs, or too little was recorded to
    simulate it.
    """

    def as_json(self) -> dict[str, Any]:
        then = self.then
        return {
            "decided": [planned_json(one) for one in self.decided],
            "differs_at_ms": None if self.differs_at is None else round(self.differs_at * 1000, 1),
            "recorded": self.recorded,
            "then": None
            if then is None
            else {
                "completed": then.completed,
                "total_ms": None if then.total == float("inf") else round(then.total * 1000, 1),
                "downtime_ms": None if then.downtime is None else round(then.downtime * 1000, 1),
                "bytes": round(then.sent),
                "switched": then.switched,
                "planned": [planned_json(one) for one in then.planned],
            },
        }


def replay(
    samples: Sequence[JobSample],
    decisions: Sequence[Decision],
    terms: RunTerms,
    began: Seconds,
    *,
    curve: DirtyCurve = UNKNOWN,
) -> Replayed:
    """Evaluate the policy in `terms` at every recorded sample.

    `began` is when the migration began, on the samples' clock; `curve` is the dirtying curve that
    was measured before. Only decisions that were acted on count as done: an observed rule changed
    nothing.

    Returns what the policy would have done, and how the migration would have continued.
    """
    track, done = (
        PassHistory(began=began, curve=curve),
        AppliedActions(max_downtime=terms.max_downtime),
    )
    theirs = [one for one in decisions if one.acted]
    ours: list[Planned] = []
    followed: list[JobSample] = []
    switched = False
    for sample in samples:
        if sample.phase not in (JobPhase.SETUP, JobPhase.PRE_COPY):
            switched = sample.phase is JobPhase.POST_COPY
            break
        before = (track, done)
        track = seen(track, sample, terms.policy.stall)
        verdict, done = decide(terms, track, done, now=sample.at, operator_stops=False)
        followed.append(sample)
        missed = _due(theirs, sample.at - _SOON)
        if verdict is None and missed is None:
            continue
        if verdict is not None:
            ours.append(planned(verdict, Seconds(sample.at - began)))
            same = _same(theirs, verdict, sample.at)
            if same is not None and (missed is None or missed is same):
                theirs.remove(same)
                continue
        instead = missed or _due(theirs, sample.at + _SOON)
        then = _go_on(followed, track if track.passes else before[0], done, terms, verdict)
        return Replayed(
            decided=tuple(ours),
            differs_at=Seconds(round(sample.at - began, 3)),
            recorded=None if instead is None else instead.action,
            then=then,
        )
    # No later sample shows a missed decision that ended the recorded pre-copy.
    missed = _due(theirs, followed[-1].at + _SOON) if followed else None
    if not followed or (missed is None and not switched):
        return Replayed(decided=tuple(ours), differs_at=None, recorded=None, then=None)
    return Replayed(
        decided=tuple(ours),
        differs_at=Seconds(round((missed or followed[-1]).at - began, 3)),
        recorded=says(SwitchToPostcopy()) if missed is None else missed.action,
        then=_go_on(followed, track, done, terms, None),
    )


def _due(theirs: Sequence[Decision], until: float) -> Decision | None:
    return next((one for one in theirs if one.at <= until), None)


def _same(theirs: Sequence[Decision], verdict: Verdict, at: float) -> Decision | None:
    """Return the recorded decision that matches the verdict, reached at time `at`, or None."""
    words = says(verdict.action)
    return next((one for one in theirs if one.action == words and abs(one.at - at) <= _SOON), None)


def _go_on(
    samples: Sequence[JobSample],
    track: PassHistory,
    done: AppliedActions,
    terms: RunTerms,
    verdict: Verdict | None,
) -> Simulated | None:
    world = fitted(samples)
    if world is None or not track.passes:
        return None
    last = samples[-1]
    start = Start(
        track=track,
        done=done,
        now=last.at,
        left=float(last.remaining),
        sent=float(last.transferred),
        verdict=verdict,
    )
    return simulate(world, terms, start)


def fitted(samples: Sequence[JobSample]) -> World | None:
    """Fit a simulated world to a migration's samples. Returns None if no data moved."""
    moving = [one.bandwidth for one in samples if one.bandwidth and one.iteration]
    if not moving:
        return None
    bandwidth = sum(moving) / len(moving)
    memory = float(max(one.total for one in samples))
    return World(
        in_use=memory,
        memory=memory,
        curve=DirtyCurve(tuple(_written(samples)), memory),
        bandwidth=bandwidth,
        later_bandwidth=bandwidth,
        postcopy_bandwidth=bandwidth,
        setup=0.0,
        backlog=Range(*BACKLOG).middle,
        stop=STOP.middle,
    )


def _written(samples: Sequence[JobSample]) -> list[tuple[float, float]]:
    """Return the duration of each finished pass and the bytes dirtied in it.

    Bytes that a pass left unsent count in the size of the next pass, but were not dirtied again.
    """
    found = []
    first: JobSample | None = None
    for before, after in pairwise(samples):
        if first is None or before.iteration != first.iteration:
            first = before
        if after.iteration == before.iteration + 1 and before.iteration:
            written = max(0, after.remaining - before.remaining)
            found.append((after.at - first.at, float(written)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of a replay, for people and for scripts."""

    guest: str
    policy: str
    mode: Mode
    recorded_policy: str
    outcome: str | None
    """The outcome of the recorded migration; None if the trace is incomplete."""
    result: Replayed

    def as_json(self) -> dict[str, Any]:
        found = _finite(self.result)
        then = found["then"]
        return {
            "guest": self.guest,
            "policy": self.policy,
            "mode": str(self.mode),
            "recorded_policy": self.recorded_policy,
            "recorded_outcome": self.outcome,
            "decisions": [*found["decided"], *(then["planned"] if then is not None else [])],
            **found,
        }


def _finite(result: Replayed) -> dict[str, Any]:
    """Return the result as JSON, with None for an infinite number of bytes."""
    if result.then is None or math.isfinite(result.then.sent):
        return result.as_json()
    found = replace(result, then=replace(result.then, sent=0.0)).as_json()
    return {**found, "then": {**found["then"], "bytes": None}}


def replayed(path: Path, policy: Policy) -> ReplayReport:
    """Replay a trace file under `policy`.

    Raises BadInput if the file is not a trace, or the policy uses mode checkpoint.
    """
    if policy.mode is Mode.CHECKPOINT:
        raise BadInput(
            f"policy {policy.name} uses mode checkpoint, which cannot be replayed",
            hint="choose another policy, or another --mode",
        )
    return under(policy, trace.read(path))


def under(policy: Policy, recorded: trace.Trace) -> ReplayReport:
    """Replay a recorded migration under `policy`."""
    # A trace of a plain pre-copy does not show whether post-copy was possible, so assume it was.
    possible = recorded.header.post_copy or recorded.header.mode is Mode.PRECOPY
    mode = request.plain_choice(policy, post_copy=possible and policy.may_switch_early)
    held = RunTerms(
        policy=policy,
        mode=mode,
        memory=recorded.header.memory,
        post_copy=mode.may_switch_early,
        time_limit=time_limit(policy, recorded.header.memory),
        max_downtime=policy.limits.max_downtime,
    )
    return ReplayReport(
        guest=recorded.header.guest,
        policy=policy.name,
        mode=mode,
        recorded_policy=recorded.header.policy,
        outcome=recorded.outcome,
        result=replay(
            recorded.samples,
            recorded.decisions,
            held,
            Seconds(0.0),
            curve=recorded.header.curve,
        ),
    )
