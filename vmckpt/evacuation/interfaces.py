"""The interfaces between an evacuation and its hosts, and the preparation of moves in advance.

Moves are prepared in advance so that no link is idle during their preflight.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vmckpt.errors import Superseded
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.plan.inventory import FleetView, Known
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.model.migration import FailureSide
from vmckpt.units import BytesPerSecond, Seconds

T = TypeVar("T")
_AHEAD = 2
"""Maximum number of prepared moves: preparing more would not make any move begin sooner."""


class Turn:
    """The permission for a move to begin."""

    def __init__(self) -> None:
        self._told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ready = False
        """Whether everything that can be done before the permission has been done."""

    async def wait(self) -> None:
        """Wait for the permission. Raises Superseded if the move is not to begin."""
        self.ready = True
        if not await asyncio.shield(self._told):
            raise Superseded("another move goes first, or the target has changed; nothing was done")

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
    """Prepares the next moves, one at a time: concurrent preparations would delay each other."""

    def __init__(self, start: "Callable[[Move, Turn], asyncio.Task[T]]") -> None:
        """`start`: starts a task that prepares a move and then waits for permission to begin."""
        self._start = start
        self._ready: dict[str, _Ready[T]] = {}
        self._begun: list[_Ready[T]] = []
        self._refused: list[_Ready[T]] = []

    def begin(self, move: Move) -> "asyncio.Task[T]":
        """Permit a move to begin, whether it is prepared or not. Returns its task."""
        ready = self._ready.get(move.name)
        if ready is None or _way(ready.move) != _way(move):
            self._refuse([move.name])
            ready = self._started(move)
        self._ready.pop(move.name, None)
        ready.turn.come()
        self._begun.append(ready)
        return ready.work

    def look(self, waiting: Collection[Move]) -> None:
        """Prepare the first unprepared move of `waiting`, the next moves in order.

        Does nothing while a move is being prepared, or if enough moves are prepared. Also dismisses
        prepared moves that are not in `waiting`.
        """
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
        """The tasks of prepared moves. If a move cannot begin, its task ends without permission."""
        return {one.work for one in self._ready.values()}

    def ended(self) -> "list[tuple[Move, asyncio.Task[T]]]":
        """Return the moves that ended without permission, each with its task, and forget them."""
        found = [one for one in self._ready.values() if one.work.done()]
        for one in found:
            del self._ready[one.move.name]
        return [(one.move, one.work) for one in found]

    async def dismiss(self) -> None:
        """Dismiss all prepared moves. Returns when their tasks have ended."""
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
    """The result of a move."""

    good: bool
    why: str = ""
    """Why the move failed; empty if it succeeded."""
    blame: FailureSide = FailureSide.TARGET
    final: str = ""
    """A hint or note for the operator if a failed move is not to be retried; otherwise empty."""
    job: str | None = None
    took: Seconds = Seconds(0.0)
    downtime: Seconds | None = None


class World(Protocol):
    """The hosts and guests that a run acts on."""

    async def look(self) -> FleetView:
        """Return the current state. Raises VmckptError only if another query would not help."""

    async def move(self, known: Known, target: str, turn: Turn) -> Moved:
        """Prepare a move, and carry it out once `turn` permits this.

        Failures are returned, not raised.
        """

    def nearing(self) -> Container[str]:
        """Return the moving guests that are expected to arrive within seconds, by name."""

    def streams(self) -> Mapping[str, BytesPerSecond]:
        """Return each running move's average bandwidth so far, by guest name; moves without enough
        measurements are omitted."""

    async def stop(self, known: Known) -> str | None:
        """Shut a guest down, or suspend it. Returns why that failed; None if it succeeded."""


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
    """Whether only the guest's standby was moved; the guest itself runs on another host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnd:
    """The result of a run's moves, shutdowns and suspensions."""

    arrived: tuple[Arrived, ...]
    shut_down: tuple[str, ...]
    """UUIDs of guests that were shut down or suspended."""
    left: tuple[Unplaced, ...]
    stopped: bool
    took: Seconds
