"""A moment in which the backup's loop does nothing, for somebody beside it who needs the standby as
it is: between two turns memory, disks and device state are of one epoch.

The loop does not wait for long, since the primary waits for the loop.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from vmckpt.errors import VmckptError
from vmckpt.units import Seconds

_LONGEST = Seconds(0.5)
_COMES = Seconds(10.0)


class Missed(VmckptError):
    """There was no such moment, or it was over before all was done."""


class _State(Enum):
    IDLE = auto()
    WANTED = auto()
    HELD = auto()
    OVERDUE = auto()


class LoopPause:
    """One at a time, wanted by one thread and granted by another."""

    def __init__(self, longest: Seconds = _LONGEST) -> None:
        """`longest`: so long the loop holds still."""
        self._longest = longest
        self._state = _State.IDLE
        self._over = False
        self._changed = threading.Condition()

    def turn(self) -> None:
        """The loop's: hold still if that is wanted."""
        if not self._is(_State.WANTED):
            return
        with self._changed:
            if not self._is(_State.WANTED):
                return
            self._become(_State.HELD)
            if not self._changed.wait_for(lambda: not self._is(_State.HELD), self._longest):
                self._become(_State.OVERDUE)

    def close(self) -> None:
        """The loop has ended, or will; nobody need wait for it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def held(self, comes: Seconds = _COMES) -> Iterator[None]:
        """The loop holds still meanwhile. Raises Missed, also at the end: it has gone on before."""
        with self._changed:
            self._become(_State.WANTED)
            self._changed.wait_for(lambda: self._is(_State.HELD) or self._over, comes)
            if not self._is(_State.HELD):
                self._become(_State.IDLE)
                raise Missed("the standby is busy, or the protection ends")
        try:
            yield
        finally:
            with self._changed:
                overdue = self._is(_State.OVERDUE)
                self._become(_State.IDLE)
        if overdue:
            raise Missed(
                f"the standby could not be held still for more than {self._longest:g} s",
                hint="try again when its host is less busy",
            )

    def _is(self, state: _State) -> bool:
        return self._state is state

    def _become(self, state: _State) -> None:
        self._state = state
        self._changed.notify_all()
