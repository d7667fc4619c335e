"""Three hosts that a test plays, and one run of the evacuation engine among them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.fake_drivers import FakeDesk
from tests.support.sights import answers, at, by, seen
from vmckpt.errors import Cancelled
from vmckpt.evacuation.engine import Run
from vmckpt.evacuation.interfaces import Moved, MoveEnd, Turn
from vmckpt.evacuation.plan.inventory import FleetView, Known, Look
from vmckpt.evacuation.task import Kind, Task, terms
from vmckpt.model.events import Decided
from vmckpt.model.guest import Guest
from vmckpt.policy.model import Policy
from vmckpt.units import GIB, BytesPerSecond, Seconds

ORDER = Task(kind=Kind.EVACUATE, host="alpha")
USUAL = by("keep_free: 1%, at_once: {source: 2, target: 2}")
GOOD = Moved(good=True, took=Seconds(5.0), job="m-1")


@dataclass
class Hosts:
    """A world of three hosts. A move takes 5 s; `fate` says what comes of one."""

    guests: dict[str, list[Guest]]
    fate: Callable[[str, str, int], Moved] = lambda *_: GOOD
    own: dict[str, Policy] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    moves: list[tuple[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    looks: int = 0
    stubborn: bool = False
    preflight: float = 0.0
    impossible: set[tuple[str, str]] = field(default_factory=set)
    dismissed: list[str] = field(default_factory=list)
    after_look: Callable[["Hosts"], None] = lambda _: None

    async def look(self) -> FleetView:
        self.looks += 1
        await asyncio.sleep(0.3)
        self.after_look(self)
        looks = [
            Look(host=at(name).host, error="no route") if name in self.silent
            else at(name, *guests, free=self.free.get(name, 8 * GIB))
            for name, guests in self.guests.items()
        ]  # fmt: skip
        return seen(answers(*looks), USUAL, self.own)

    async def move(self, known: Known, target: str, turn: Turn) -> Moved:
        name = known.guest.name
        await asyncio.sleep(self.preflight)
        if (name, target) in self.impossible:
            return Moved(good=False, why="preflight says no", final="change it")
        try:
            await turn.wait()
        except Cancelled:
            self.dismissed.append(name)
            return Moved(good=False, why="others go first", final="it was cancelled")
        tries = sum(one == name for one, _ in self.moves)
        self.moves.append((name, target))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(5)
        self.running -= 1
        came = self.fate(name, target, tries)
        if came.good:
            self.go(name, target)
        return came

    def go(self, name: str, target: str) -> None:
        (source,) = [
            host for host, found in self.guests.items() if any(one.name == name for one in found)
        ]
        (guest,) = [one for one in self.guests[source] if one.name == name]
        self.guests[source].remove(guest)
        self.guests[target].append(replace(guest, job=None))

    def nearing(self) -> frozenset[str]:
        return frozenset()

    def streams(self) -> dict[str, BytesPerSecond]:
        return {}

    async def stop(self, known: Known) -> str | None:
        await asyncio.sleep(3)
        if self.stubborn:
            return "it did not shut down within 2 min"
        host = self.guests[known.host]
        host.remove(known.guest)
        return None

    @property
    def names(self) -> dict[str, list[str]]:
        return {host: sorted(one.name for one in found) for host, found in self.guests.items()}


def hosts(*guests: Guest, **more: object) -> Hosts:
    made = Hosts({"alpha": list(guests), "beta": [], "gamma": []})
    for name, value in more.items():
        setattr(made, name, value)
    return made


async def run(
    world: Hosts, order: Task = ORDER, *, stop: asyncio.Event | None = None,
    step_log: FakeDesk | None = None, told: list[str] | None = None,
) -> MoveEnd:  # fmt: skip
    def tell(event: Decided) -> None:
        if told is not None:
            told.append(f"{event.decision.action}: {event.decision.reason}")

    limits = terms(USUAL.evacuation, order.kind)
    going = Run(world, order, limits, stop or asyncio.Event(), tell=tell, step_log=step_log)
    return await going.through(None)


def failing(*bad: tuple[str, str, int], **how: Any) -> Callable[[str, str, int], Moved]:
    """Bad are (guest, target, try), "*" is any and -1 every try."""
    came = replace(Moved(good=False, why="the connection was reset"), **how)

    def fate(guest: str, target: str, tries: int) -> Moved:
        for name, host, number in bad:
            if name in ("*", guest) and host in ("*", target) and number in (-1, tries):
                return came
        return GOOD

    return fate
