"""Simulate a plan before any guest moves: how long it takes, and how full hosts become. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vmckpt.evacuation import schedule
from vmckpt.evacuation.bandwidth import Move, Under, advance, begin, over
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules
from vmckpt.evacuation.schedule import Windows
from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastMove:
    """A move in the simulated run."""

    move: Move
    begins: Seconds
    ends: Seconds
    detour: bool = False
    """Whether the target is only temporary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The memory and cores of a host that are used by guests."""

    host: str
    memory: Bytes
    before: Bytes
    most: Bytes
    """The maximum during the run, including incoming migrations."""
    after: Bytes
    cpus_before: float
    cpus_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """The expected course of a plan."""

    steps: tuple[ForecastMove, ...]
    total: Seconds
    loads: tuple[Load, ...]
    """The loads of those hosts whose load changes."""
    stuck: tuple[Move, ...]
    """Moves that can never begin."""


def play(fleet: Fleet, moves: Sequence[Move], rules: Rules, windows: Windows) -> PlanForecast:
    """Simulate the moves of a plan, each with its expected duration."""
    return _Play(fleet, moves, rules, windows).through()


class _Play:
    def __init__(self, fleet: Fleet, moves: Sequence[Move], rules: Rules, windows: Windows) -> None:
        self._windows, self._links = windows, schedule.links_of(fleet)
        self._capacity = CapacityModel(fleet.places, fleet.tenants, rules)
        self._before = self._capacity.used.copy()
        self._cpus_before = self._capacity.cpus_used.copy()
        self._most = self._before.copy()
        self._waiting, self._running = list(moves), list[Under]()
        self._since: dict[str, float] = {}
        self._steps: list[ForecastMove] = []
        self._aside: set[str] = set()
        self._changed: set[str] | None = None
        self._now = 0.0

    def through(self) -> PlanForecast:
        while self._waiting or self._running:
            self._begin()
            if not self._running:
                break
            self._advance()
        return PlanForecast(
            steps=tuple(self._steps), total=Seconds(self._now), loads=tuple(self._loads()),
            stuck=tuple(self._waiting),
        )  # fmt: skip

    def _begin(self) -> None:
        begun = schedule.start(
            self._capacity, self._waiting, self._running, self._links, self._windows,
            changed=self._changed,
        )  # fmt: skip
        names = {one.name for one in begun}
        self._waiting = [one for one in self._waiting if one.name not in names]
        if not begun and not self._running:
            begun = self._step_aside()
        for move in begun:
            self._running.append(begin(move))
            self._since[move.name] = self._now
        self._most = self._most.clip(min=self._capacity.used)

    def _step_aside(self) -> list[Move]:
        """Move a guest to a temporary host, if this lets another guest move.

        Returns this move, if any. Each guest moves aside at most once: otherwise two guests could
        make way for each other forever.
        """
        able = [one for one in self._waiting if one.name not in self._aside]
        found = schedule.detour(self._capacity, able)
        if found is None:
            return []
        self._aside.add(found.name)
        self._waiting = [
            replace(one, source=found.target, tenant=replace(one.tenant, host=found.target))
            if one.name == found.name else one
            for one in self._waiting
        ]  # fmt: skip
        self._capacity.place(found.tenant, self._capacity.index[found.target])
        return [found]

    def _advance(self) -> None:
        # At the total limit, the end of any move allows any other move to begin.
        full = len(self._running) >= self._windows.total
        step, after = advance(self._running, self._links)
        self._now += step
        about = {one.move.name for one in self._running if not one.ending}
        self._changed = None if full else {
            host for one in after if over(one) or (one.ending and one.move.name in about)
            for host in (one.move.source, one.move.target)
        }  # fmt: skip
        self._running = [one for one in after if not over(one)]
        for one in after:
            if over(one):
                move = one.move
                self._capacity.remove(move.tenant, self._capacity.index[move.source])
                self._steps.append(
                    ForecastMove(
                        move=move, begins=Seconds(self._since[move.name]), ends=Seconds(self._now),
                        detour=any(other.name == move.name for other in self._waiting),
                    )
                )  # fmt: skip

    def _loads(self) -> list[Load]:
        capacity = self._capacity
        return [
            Load(
                host=place.name, memory=place.memory, before=Bytes(round(self._before[at])),
                most=Bytes(round(self._most[at])), after=Bytes(round(capacity.used[at])),
                cpus_before=float(self._cpus_before[at]), cpus_after=float(capacity.cpus_used[at]),
            )
            for at, place in enumerate(capacity.places)
            if self._most[at] != self._before[at] or capacity.used[at] != self._before[at]
        ]  # fmt: skip
