"""What an evacuation acts on, and moves that are prepared before their turn.

No link is to lie idle for a preflight.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vmckpt.errors import Superseded
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.plan.inventory import FleetView, Known
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.state import FailureSide
from vmckpt.units import BytesPerSecond, Seconds

T = TypeVar("T")
_AHEAD = 2
"""So many wait ready for their turn: more would not begin sooner."""


class Turn:
    """When a move may begin."""

    def __init__(self) -> None:
        self._told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ready = False
        """All that can be done before it is done."""

    async def wait(self) -> None:
        """Raises Superseded if it does not come."""
        self.ready = True
        if not await asyncio.shield(self._told):
            raise Superseded("others go first, or it goes elsewhere; nothing was changed")

    def come(self) -> None:
        if not self._told.done():
            self._told.set_result(True)

    def refuse(self) -> None:
        if not self._told.done():
            self._told.set_result(False)


@dataclass(frozen=True, slots=True)
class _Ready(Generic[T]):
    move: Move
    turn: Turn
    work: "asyncio.Task[T]"


class Prefetcher(Generic[T]):
    """Who is made ready, one at a time: several at once would keep each other waiting."""

    def __init__(self, start: "Callable[[Move, Turn], asyncio.Task[T]]") -> None:
        """`start`: begin to make a move ready; it goes on when its turn comes."""
        self._start = start
        self._ready: dict[str, _Ready[T]] = {}
        self._begun: list[_Ready[T]] = []
        self._refused: list[_Ready[T]] = []

    def begin(self, move: Move) -> "asyncio.Task[T]":
        """Its turn has come, whether it was made ready or not."""
        ready = self._ready.get(move.name)
        if ready is None or _way(ready.move) != _way(move):
            self._refuse([move.name])
            ready = self._started(move)
        self._ready.pop(move.name, None)
        ready.turn.come()
        self._begun.append(ready)
        return ready.work

    def look(self, waiting: Collection[Move]) -> None:
        """`waiting`: who is next, in order. Others are not made ready any more."""
        ways = {_way(one) for one in waiting}
        self._refuse([name for name, one in self._ready.items() if _way(one.move) not in ways])
        self._begun = [one for one in self._begun if not one.work.done()]
        busy = any(not one.turn.ready for one in (*self._begun, *self._ready.values()))
        if busy or len(self._ready) >= _AHEAD:
            return
        for move in waiting:
            if move.name not in self._ready:
                self._ready[move.name] = self._started(move)
                return

    @property
    def works(self) -> "set[asyncio.Task[T]]":
        """What may end before its turn, because it cannot begin at all."""
        return {one.work for one in self._ready.values()}

    def ended(self) -> "list[tuple[Move, asyncio.Task[T]]]":
        """Those that have ended before their turn; they are not ahead any more."""
        found = [one for one in self._ready.values() if one.work.done()]
        for one in found:
            del self._ready[one.move.name]
        return [(one.move, one.work) for one in found]

    async def dismiss(self) -> None:
        """No turn comes any more; returns when nobody waits for one."""
        self._refuse(list(self._ready))
        await asyncio.gather(*(one.work for one in self._refused), return_exceptions=True)

    def cancel(self) -> None:
        for one in (*self._ready.values(), *self._refused):
            one.work.cancel()

    def _started(self, move: Move) -> _Ready[T]:
        turn = Turn()
        return _Ready(move, turn, self._start(move, turn))

    def _refuse(self, names: Iterable[str]) -> None:
        for name in names:
            if (one := self._ready.pop(name, None)) is not None:
                one.turn.refuse()
                self._refused.append(one)


def _way(move: Move) -> tuple[str, str, str]:
    return move.name, move.source, move.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What came of one move."""

    good: bool
    why: str = ""
    """Why not."""
    blame: FailureSide = FailureSide.TARGET
    final: str = ""
    """What somebody has to do about it: it is not tried again; empty: it may be."""
    job: str | None = None
    took: Seconds = Seconds(0.0)
    downtime: Seconds | None = None


class World(Protocol):
    """What a run acts on."""

    async def look(self) -> FleetView:
        """What is true now. Raises VmckptError only for what looking again does not mend."""

    async def move(self, known: Known, target: str, turn: Turn) -> Moved:
        """Make a move ready, and carry it out when its turn comes; returns however it ends."""

    def nearing(self) -> Container[str]:
        """Guests on their way that are expected to arrive within seconds, by name."""

    def streams(self) -> Mapping[str, BytesPerSecond]:
        """What those of guests on their way carry so far, by name; without those that have told
        nothing yet."""

    async def stop(self, known: Known) -> str | None:
        """Shut a guest down, or suspend it; why that did not come about, None: it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A guest that was moved."""

    guest: str
    uuid: str
    source: str
    target: str
    job: str | None
    took: Seconds
    downtime: Seconds | None
    standby: bool = False
    """It was not the guest itself, which runs elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnd:
    """How a run ended."""

    arrived: tuple[Arrived, ...]
    shut_down: tuple[str, ...]
    """UUIDs."""
    left: tuple[Unplaced, ...]
    stopped: bool
    took: Seconds
