"""What can be seen of a guest from outside: when it was silent and which numbers it told. Pure.

All times are seconds on the observer's monotonic clock. A guest's clock stops with the guest, so
nothing here is measured by it.
"""

import os
from collections import deque
from dataclasses import dataclass, field

from vmckpt_lab.observer import messages

PROBES = "VMCKPT_LAB_PROBES"
"""The environment's: probes of a guest in a second, if not 200. Each costs the guest under TCG some
0.5 ms, and many guests at once have no time for so many."""
PROBE_INTERVAL = 1 / float(os.environ.get(PROBES, "200"))
NOTABLE = 2.4 * PROBE_INTERVAL
"""Shorter silences are the normal rhythm of probes and answers."""
_KEEP = 20_000
_QUESTIONS = 20_000
"""So many are remembered, a hundred seconds of them."""
_OVERTAKE = 64
"""By so many numbers one may be late."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without something."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Rhythm:
    """Something that should happen every few milliseconds, and the gaps in it."""

    last: float | None = None
    gaps: deque[Gap] = field(default_factory=lambda: deque(maxlen=_KEEP))

    def beat(self, at: float) -> None:
        if self.last is not None and at - self.last > NOTABLE:
            self.gaps.append(Gap(self.last, at))
        self.last = at if self.last is None else max(at, self.last)

    def gaps_between(self, since: float, until: float) -> list[Gap]:
        """Gaps that touch the window, the one that lasts until now included."""
        found = [gap for gap in self.gaps if gap.end > since and gap.start < until]
        if self.last is not None and until - self.last > NOTABLE:
            found.append(Gap(self.last, until))
        return found


def blackout(answers: Rhythm, own: Rhythm, since: float, until: float) -> float:
    """The longest silence of a guest in a window, in seconds, less the observer's own silences."""
    own_gaps = own.gaps_between(since, until)

    def net(gap: Gap) -> float:
        return gap.length - sum(
            max(0.0, min(gap.end, o.end) - max(gap.start, o.start)) for o in own_gaps
        )

    return max((net(gap) for gap in answers.gaps_between(since, until)), default=PROBE_INTERVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the observer tells of a guest when asked."""

    now: float
    blackout: float
    """The longest silence in the window asked for, seconds."""
    answered_at: float | None
    """When it last answered; None if it never did."""
    runs: int
    """How often the guest was started since it is watched."""
    run: int
    """The newest run's number, drawn by the guest."""
    ticks: int
    pages_written: int
    highest: int
    """The highest number the newest run told."""
    heard: int
    """How many numbers of it were heard; the network may lose some."""
    conflicts: int
    forgotten: int
    verified: messages.Message | None
    """The guest's answer to the last request to check itself."""


@dataclass(slots=True)
class Output:
    """The numbers told by one run of a guest, and what cannot be if only one copy of it runs."""

    first: int = 0
    highest: int = 0
    heard: int = 0
    conflicts: int = 0
    """Numbers told twice with different contents: two copies, or a rolled-back one."""
    forgotten: int = 0
    """Answers of a guest that did not know a number it had told before."""
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
        """Whether it left before a later number that overtook it: on a busy machine one CPU's queue
        is emptied before another's. A second copy's clock would not fit in between."""
        later = range(message.number + 1, min(self.highest, message.number + _OVERTAKE) + 1)
        after = next((self._recent[one] for one in later if one in self._recent), None)
        return after is not None and message.clock_ns < after.clock_ns

    def answer(self, message: messages.Message, told: int) -> None:
        """`told`: the highest number that had been heard when the question was asked. Later ones
        prove nothing: an answer may wait in the guest while numbers leave."""
        if message.number < told:
            self.forgotten += 1


@dataclass(slots=True)
class Sightings:
    """Everything heard from one guest."""

    answers: Rhythm = field(default_factory=Rhythm)
    outputs: dict[int, Output] = field(default_factory=dict)
    latest: messages.Message | None = None
    verified: messages.Message | None = None
    _asked: dict[int, dict[int, int]] = field(default_factory=dict)
    """By token: the highest number that each run had told by then."""

    def ask(self, token: int) -> None:
        """A question leaves; asked again it is the same question."""
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
        # What was asked too long ago for us to know when proves nothing.
        output.answer(message, self._asked.get(message.token, {}).get(message.run, 0))

    def view(self, own: Rhythm, *, now: float, since: float, until: float) -> View:
        """Everything at once; `own` are the observer's own gaps."""
        run = self.latest.run if self.latest else 0
        output = self.outputs.get(run, Output())
        return View(
            now=now,
            blackout=blackout(self.answers, own, since, until),
            answered_at=self.answers.last,
            runs=len(self.outputs),
            run=run,
            ticks=self.latest.ticks if self.latest else 0,
            pages_written=self.latest.pages_written if self.latest else 0,
            highest=output.highest,
            heard=output.heard,
            conflicts=sum(one.conflicts for one in self.outputs.values()),
            forgotten=sum(one.forgotten for one in self.outputs.values()),
            verified=self.verified,
        )
