"""What a policy would have made of a migration that was recorded. Pure.

The recorded samples are true only as long as the same is done. So they are followed up to the point
where the policy would have acted otherwise; from there a simulation goes on, of a world fitted to
what the samples showed until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vmckpt.migrate.actions import Switch, says
from vmckpt.migrate.converge import Done, Terms, Verdict, decide
from vmckpt.migrate.dirtying import DirtyCurve
from vmckpt.migrate.experience import STOP
from vmckpt.migrate.forecast import BACKLOG, Range, planned_json
from vmckpt.migrate.simulate import planned, simulate
from vmckpt.migrate.track import UNKNOWN, Track, seen
from vmckpt.migrate.world import Planned, Simulated, Start, World
from vmckpt.model.migration import Decision, JobPhase, JobSample
from vmckpt.units import Seconds

# An action is taken a little after the sample that asked for it.
_SOON = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy would have done."""

    decided: tuple[Planned, ...]
    """On the recorded samples, the differing one included."""
    differs_at: Seconds | None
    """Since the migration began; None: it would have done what was done."""
    recorded: str | None
    """What was done then instead; None: nothing."""
    then: Simulated | None
    """How it would have gone on; None: as recorded, or nothing is known to go on from."""

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
    terms: Terms,
    began: Seconds,
    *,
    curve: DirtyCurve = UNKNOWN,
) -> Replayed:
    """Ask the policy in `terms` at every recorded sample. `began` is the clock of the samples.

    `curve` is what was measured before.

    Only decisions that were acted on count as done: an observed rule changed nothing.
    """
    track, done = Track(began=began, curve=curve), Done(max_downtime=terms.max_downtime)
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
    # What ended the record's pre-copy has no later sample to be missed at.
    missed = _due(theirs, followed[-1].at + _SOON) if followed else None
    if not followed or (missed is None and not switched):
        return Replayed(decided=tuple(ours), differs_at=None, recorded=None, then=None)
    return Replayed(
        decided=tuple(ours),
        differs_at=Seconds(round((missed or followed[-1]).at - began, 3)),
        recorded=says(Switch()) if missed is None else missed.action,
        then=_go_on(followed, track, done, terms, None),
    )


def _due(theirs: Sequence[Decision], until: float) -> Decision | None:
    return next((one for one in theirs if one.at <= until), None)


def _same(theirs: Sequence[Decision], verdict: Verdict, at: float) -> Decision | None:
    """The recorded decision that is this one."""
    words = says(verdict.action)
    return next((one for one in theirs if one.action == words and abs(one.at - at) <= _SOON), None)


def _go_on(
    samples: Sequence[JobSample],
    track: Track,
    done: Done,
    terms: Terms,
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
    """The world that a migration's samples show; None: no byte was seen to move."""
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
    """For each pass that ended, how long it took and what was written in it.

    What it left unsent is in the next one's beginning, too, and was not written again.
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
