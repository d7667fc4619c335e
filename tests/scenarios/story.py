"""Golden stories: migrations in the form of `migrate --trace`, and what is decided in each.

A story is made by `record`: a simulated machine obeys the decisions as they fall. What came of it
is kept as a trace and a list of decisions. `replay` reads the trace alone and decides anew.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.simulated import Machine
from vmckpt.migration import report, trace
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.run import actions, decide, progress
from vmckpt.migration.run.actions import (
    Abort,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    SetXbzrleCache,
    SwitchToPostcopy,
)
from vmckpt.migration.run.decide import AppliedActions
from vmckpt.migration.run.outcome import PassCounter
from vmckpt.migration.run.progress import PassHistory
from vmckpt.migration.trace import Header
from vmckpt.model.migration import JobPhase, JobSample, Mode
from vmckpt.policy import loader
from vmckpt.policy.model import Policy
from vmckpt.units import Bytes, Seconds

HERE = Path(__file__).parent
TRACES = HERE / "traces"
SHORTEST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """How a trace came about, and what must be true of it whatever is golden."""

    name: str
    about: str
    policy: str
    """A shipped one by name, or a file beside this module."""
    machine: Callable[[], Machine]
    mode: Mode = Mode.HYBRID
    post_copy: bool = True
    curve: tuple[tuple[float, float], ...] = ()
    interval: float = 0.5
    gives_up_after: float = 3600.0
    """The link's or libvirt's patience."""
    never: tuple[str, ...] = ()
    """Words that no decision may have in its action."""
    within: float | None = None
    """It must have arrived by then; None: it must not arrive."""


@dataclass(frozen=True, slots=True)
class Decided:
    """One line of what is expected."""

    at: float
    rule: str
    action: str

    def __str__(self) -> str:
        return f"{self.at:8.1f} s  {self.rule}: {self.action}"


@dataclass
class Judge:
    """Takes samples as the engine does, and decides."""

    header: Header
    policy: Policy
    counter: PassCounter = field(default_factory=PassCounter)
    decided: list[Decided] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """What would be shown as done."""
    _seen: list[JobSample] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy, memory = self.policy, self.header.memory
        self.terms = decide.RunTerms(
            policy=policy, mode=self.header.mode, memory=memory, post_copy=self.header.post_copy,
            time_limit=decide.time_limit(policy, memory), max_downtime=policy.limits.max_downtime,
        )  # fmt: skip
        self.done = AppliedActions(max_downtime=policy.limits.max_downtime)
        self.track = PassHistory(began=Seconds(0.0), curve=self.header.curve)

    def take(self, raw: JobSample) -> decide.Verdict | None:
        """What to do at this sample."""
        self.counter = self.counter.after(raw.iteration)
        sample = replace(raw, iteration=self.counter.number(raw.iteration))
        if sample.iteration or sample.total:
            self.track = progress.seen(self.track, sample, self.policy.stall)
            self._seen.append(sample)
            guess = progress.estimate(self._seen, self.done.max_downtime)
            self.shares.append(progress.share_done(guess, sample.at))
        verdict, self.done = decide.decide(
            self.terms, self.track, self.done, now=raw.at, operator_stops=False
        )
        if verdict is not None:
            says = actions.says(verdict.action)
            self.decided.append(Decided(raw.at, verdict.rule, says))
        return verdict

    @property
    def ended(self) -> bool:
        """It was given up: the engine asks no more, it only aborts."""
        return bool(self.decided) and self.decided[-1].action == "abort"


def policy_of(name: str) -> Policy:
    own = HERE / name
    if own.is_file():
        return loader.load_file(own)
    return {one.name: one for one in loader.load_all(None)}[name]


def record(story: Story) -> tuple[list[str], list[Decided]]:
    """The lines of the trace, and what was decided."""
    machine, policy = story.machine(), policy_of(story.policy)
    machine.max_downtime = policy.limits.max_downtime
    machine.limit = policy.limits.bandwidth
    memory = Bytes(machine.memory)
    header = Header(
        guest="guest", memory=memory, policy=story.policy, mode=story.mode,
        post_copy=story.post_copy, curve=DirtyCurve(story.curve, memory),
    )  # fmt: skip
    judge, lines, at = Judge(header, policy), [json.dumps(header.as_json())], 0.0
    while not machine.done and not judge.ended and at < story.gives_up_after:
        sample = machine.sample(at)
        lines.append(json.dumps({"sample": report.sample_as_json(sample, Seconds(0.0))}))
        read = trace.parse([lines[0], lines[-1]], story.name)  # rounded, as it will be read
        verdict = judge.take(read.samples[0])
        if verdict is not None:
            _obey(machine, verdict.action, policy)
        wait = story.interval
        if machine.phase is JobPhase.PRE_COPY and machine.bandwidth:
            wait = max(SHORTEST, min(wait, machine.remaining / machine.bandwidth))
        at = round(at + wait, 3)
        machine.advance(at)
    outcome = "completed" if machine.done else "not-converged" if judge.ended else "failed"
    lines.append(json.dumps({"outcome": outcome}))
    return lines, [*judge.decided, Decided(at, "outcome", outcome)]


def replay(lines: Iterable[str], name: str) -> Judge:
    """Decide anew over a trace."""
    read = trace.parse(lines, name)
    judge = Judge(read.header, policy_of(read.header.policy))
    for sample in read.samples:
        if not judge.ended:
            judge.take(sample)
    return judge


def _obey(machine: Machine, action: actions.Action, policy: Policy) -> None:
    match action:
        case SetDowntime(limit):
            machine.max_downtime = limit
        case SetThrottle(how):
            machine.throttle = how
        case SwitchToPostcopy():
            machine.limit = policy.limits.postcopy_bandwidth
            machine.switch()
        case PauseGuest():
            machine.halt()
        case SetXbzrleCache() | LimitBandwidth() | Abort():
            pass
