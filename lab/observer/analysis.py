"""Evaluate what the observer receives from a guest: its silences and its numbers. Pure.

All times are in seconds on the observer's monotonic clock. A guest's clock stops with the guest, so
it is not used for measurements.
"""

from collections import deque
from dataclasses import dataclass, field

from vmckpt_lab.observer import messages
from vmckpt_lab.pace import PROBE_INTERVAL

NOTABLE = 2.4 * PROBE_INTERVAL
"""Maximum normal time between two beats of a Rhythm, in seconds."""
_KEEP = 20_000
_QUESTIONS = 20_000
"""Maximum number of probes that are remembered; by default, those of 100 seconds."""
_OVERTAKE = 64
"""Maximum number of later numbers that may overtake a number."""


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval in which a Rhythm has no beat."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Rhythm:
    """Beats (events that should occur every few milliseconds), and the gaps between them."""

    last: float | None = None
    gaps: deque[Gap] = field(default_factory=lambda: deque(maxlen=_KEEP))

    def beat(self, at: float) -> None:
        if self.last is not None and at - self.last > NOTABLE:
            self.gaps.append(Gap(self.last, at))
        self.last = at if self.last is None else max(at, self.last)

    def gaps_between(self, since: float, until: float) -> list[Gap]:
        """Return the gaps that overlap the window, including a gap that has not ended yet.

        `since`, `until`: the window, in monotonic seconds.
        """
        found = [gap for gap in self.gaps if gap.end > since and gap.start < until]
        if self.last is not None and until - self.last > NOTABLE:
            found.append(Gap(self.last, until))
        return found


def blackout(answers: Rhythm, own: Rhythm, since: float, until: float) -> float:
    """Return the longest silence that overlaps a window, in seconds, minus the observer's own gaps.

    Without a gap in the answers, the result is `PROBE_INTERVAL`.
    """
    own_gaps = own.gaps_between(since, until)

    def net(gap: Gap) -> float:
        return gap.length - sum(
            max(0.0, min(gap.end, o.end) - max(gap.start, o.start)) for o in own_gaps
        )

    return max((net(gap) for gap in answers.gaps_between(since, until)), default=PROBE_INTERVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The observer's report on a guest."""

    now: float
    blackout: float
    """The longest silence that overlaps the requested window, in seconds; see `blackout`."""
    answered_at: float | None
    """Time of the last answer; None if the guest has not answered yet."""
    runs: int
    """Number of runs of the guest from which the observer has received messages."""
    run: int
    """The ID of the newest run, a random number that the guest chose."""
    pages_written: int
    highest: int
    """The highest number that the newest run sent."""
    heard: int
    """How many numbers of the newest run were received; the network may lose some."""
    conflicts: int
    forgotten: int
    verified: messages.Message | None
    """The guest's last answer to a request to check itself; None: it has not answered yet."""


@dataclass(slots=True)
class Output:
    """The numbers that a run of a guest sent, and contradictions impossible with a single copy."""

    first: int = 0
    highest: int = 0
    heard: int = 0
    conflicts: int = 0
    """Numbers sent twice with different contents: by two copies, or after a rollback."""
    forgotten: int = 0
    """Answers in which the highest number is lower than a number sent earlier."""
    _recent: dict[int, messages.Message] = field(default_factory=dict)

    def number(self, message: messages.Message) -> None:
        known = self._recent.get(message.number)
        if known is not None:
            self.conflicts += known != message
        elif message.number <= self.highest and not self._late(message):
            self.conflicts += 1
        else:
            self.first = min(self.first, message.number) or message.number
            self.highest = max(self.highest, message.number)
            self.heard += 1
        self._recent[message.number] = message
        self._recent.pop(message.number - 4096, None)

    def _late(self, message: messages.Message) -> bool:
        """Return whether a number was sent before a later number that overtook it.

        On a busy machine, one CPU's queue may be emptied before another's. The clock of a second
        copy would not fit in between.
        """
        later = range(message.number + 1, min(self.highest, message.number + _OVERTAKE) + 1)
        after = next((self._recent[one] for one in later if one in self._recent), None)
        return after is not None and message.clock_ns < after.clock_ns

    def answer(self, message: messages.Message, told: int) -> None:
        """Check an answer. `told`: the highest number received before the question was sent.

        Later numbers prove nothing, as the guest may send numbers while an answer is queued.
        """
        if message.number < told:
            self.forgotten += 1


@dataclass(slots=True)
class Sightings:
    """Everything received from a guest."""

    answers: Rhythm = field(default_factory=Rhythm)
    outputs: dict[int, Output] = field(default_factory=dict)
    latest: messages.Message | None = None
    verified: messages.Message | None = None
    _asked: dict[int, dict[int, int]] = field(default_factory=dict)
    """By token of a question: the highest number received from each run before the question."""

    def ask(self, token: int) -> None:
        """Record that a question is sent. A repeated question keeps its first record."""
        told = {run: output.highest for run, output in self.outputs.items()}
        self._asked.setdefault(token, told)
        if len(self._asked) > _QUESTIONS:
            del self._asked[next(iter(self._asked))]

    def hear(self, message: messages.Message, at: float) -> None:
        output = self.outputs.setdefault(message.run, Output())
        if message.kind == messages.NUMBER:
            output.number(message)
        elif message.kind == messages.PONG:
            self._answered(output, message)
            self.answers.beat(at)
        elif message.kind == messages.VERIFIED:
            self._answered(output, message)
            self.verified = message
        self.latest = message

    def _answered(self, output: Output, message: messages.Message) -> None:
        # An answer to a question that is no longer remembered proves nothing.
        output.answer(message, self._asked.get(message.token, {}).get(message.run, 0))

    def view(self, own: Rhythm, *, now: float, since: float, until: float) -> View:
        """Return the report on the guest. `own`: the observer's own rhythm."""
        run = self.latest.run if self.latest else 0
        output = self.outputs.get(run, Output())
        return View(
            now=now,
            blackout=blackout(self.answers, own, since, until),
            answered_at=self.answers.last,
            runs=len(self.outputs),
            run=run,
            pages_written=self.latest.pages_written if self.latest else 0,
            highest=output.highest,
            heard=output.heard,
            conflicts=sum(one.conflicts for one in self.outputs.values()),
            forgotten=sum(one.forgotten for one in self.outputs.values()),
            verified=self.verified,
        )
