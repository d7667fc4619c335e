"""Simulate an evacuation, with moves that take longer or shorter than expected, or fail. Pure.

How much a move actually sends, and whether it fails, is drawn from the seed before the move begins.
The code that makes decisions does not know the result of the draw.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from vmckpt.evacuation import state as states
from vmckpt.evacuation.bandwidth import Move, Under, advance, begin, over, shares
from vmckpt.evacuation.plan.fleet import Fleet
from vmckpt.evacuation.schedule import links_of
from vmckpt.evacuation.state import EvacuationTerms, Failed, RunState
from vmckpt.model.migration import FailureSide
from vmckpt.units import Bytes, BytesPerSecond, Seconds

_LONGEST = Seconds(7 * 86400.0)
Hold = Callable[["Sim"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """What goes wrong in a simulation."""

    off: float = 0.3
    """Maximum error of the expected size of a move, as a fraction, in both directions."""
    fails: float = 0.0
    """Share of moves that fail halfway."""
    broken: frozenset[str] = frozenset()
    """Hosts to which every move fails."""
    most: BytesPerSecond | None = None
    """The actual limit of one stream, regardless of its links; None: only the links limit it."""

    def of(self, seed: int, move: Move, tries: int) -> "AttemptOutcome":
        """Return the outcome of an attempt.

        The outcome depends only on the seed, the guest, the target, and `tries`, the number of
        earlier attempts.
        """
        dice = random.Random(f"{seed} {move.name} {tries}")
        off = 1 + dice.uniform(-self.off, self.off)
        if move.target in self.broken:
            return AttemptOutcome(share=off / 2, fails=f"{move.target} refuses", most=self.most)
        fails = dice.random() < self.fails
        share = off / 2 if fails else off
        why = "the connection was reset" if fails else None
        return AttemptOutcome(share=share, fails=why, most=self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """The outcome of an attempt."""

    share: float
    """Amount of data sent, as a share of the expected amount."""
    fails: str | None
    """Why the attempt fails after this data is sent; None: the attempt succeeds."""
    most: BytesPerSecond | None
    """See `Luck.most`."""

    def real(self, move: Move) -> Move:
        """Return the move with its actual amount of data and its actual bandwidth limit."""
        size = Bytes(max(1, round(move.tenant.travels * self.share)))
        most = move.tenant.most if self.most is None else self.most
        return replace(move, tenant=replace(move.tenant, size=size, most=most))


class Sim:
    """A simulated run of a plan. `fleet` is the true state: each guest is on one host."""

    def __init__(
        self, fleet: Fleet, asked: frozenset[str], terms: EvacuationTerms, *, luck: Luck, seed: int
    ) -> None:
        self.fleet, self._asked, self._terms = fleet, asked, terms
        self._luck, self._seed = luck, seed
        self.course = RunState()
        self.now = 0.0
        self.moved: list[Move] = []
        """All moves that succeeded, in order."""
        self._real: list[Under] = []
        self._fate: dict[str, str | None] = {}
        self._tries: Counter[str] = Counter()
        self._changed: set[str] | None = None
        """Hosts that changed since the last check for due moves; None: any host may have
        changed."""

    def run(self, look: Hold = lambda _: None) -> None:
        """Run the simulation to its end, for at most seven simulated days.

        `look` is called whenever something has changed, and at the end.
        """
        self._replan()
        while not self.course.over and self.now < _LONGEST:
            self._begin()
            look(self)
            if not self._step():
                break
        look(self)

    def _replan(self) -> None:
        self._changed = None
        here = {one.name: one.host for one in self.fleet.tenants}
        closed = {one.name for one in self.fleet.places if one.closed is not None}
        asked = frozenset(name for name in self._asked if here[name] in closed)
        self.course = states.planned(
            self.course, self.fleet, self._terms.rules, self.now, asked=asked
        )

    def _begin(self) -> None:
        if self._luck.most is not None:  # otherwise the observed rates add nothing
            rates = shares(self._real, links_of(self.fleet))
            seen = {name: BytesPerSecond(round(rate)) for name, rate in rates.items()}
            self.course = states.carrying(self.course, seen)
        near = {one.move.name for one in self._real if one.ending}
        self.course = states.nearing(self.course, near)
        begun = states.due(self.course, self.fleet, self._terms, self.now, changed=self._changed)
        self.course = states.begins(self.course, begun)
        for move in begun:
            fate = self._luck.of(self._seed, move, self._tries[move.name])
            self._tries[move.name] += 1
            self._fate[move.name] = fate.fails
            self._real.append(begin(fate.real(move)))

    def _step(self) -> bool:
        """Advance to the next change. Returns False if nothing can change any more."""
        wakes = states.wakes(self.course, self.now, self._terms.patience)
        if not self._real:
            if wakes is None:
                return False
            self.now = wakes
            self._replan()
            return True
        # The next attempt for a guest that is waiting depends on the clock, not on host changes.
        again = any(one.name in self.course.failed for one in self.course.waiting)
        full = again or len(self._real) >= self._terms.windows.total
        about = {one.move.name for one in self._real if not one.ending}
        took, after = advance(self._real, links_of(self.fleet))
        self.now += took
        self._changed = None if full else {
            host for one in after if over(one) or (one.ending and one.move.name in about)
            for host in (one.move.source, one.move.target)
        }  # fmt: skip
        self._real = [one for one in after if not over(one)]
        ended = [one.move for one in after if over(one)]
        for move in ended:
            self._end(move.name)
        if self.course.hoping or any(self._fate[one.name] is not None for one in ended):
            self._replan()
        return True

    def _end(self, guest: str) -> None:
        move = next(one.move for one in self.course.running if one.move.name == guest)
        why = self._fate[guest]
        if why is None:
            self.course = states.succeeded(self.course, guest)
            self.moved.append(move)
            self.fleet = replace(
                self.fleet,
                tenants=tuple(
                    replace(one, host=move.target) if one.name == guest else one
                    for one in self.fleet.tenants
                ),
            )
            return
        failure = Failed(target=move.target, at=self.now, why=why, blame=FailureSide.TARGET)
        self.course = states.failed(self.course, guest, failure, self._terms.patience)
