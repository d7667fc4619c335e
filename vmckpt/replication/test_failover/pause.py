"""Pause the backup's loop for another thread that needs the standby unchanged.

Between two turns of the loop, memory, disks and device state are those of one epoch. The loop waits
only for a short time, since the primary waits for the loop.
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
    """The loop was not paused in time, or it continued before the work was done."""


class _State(Enum):
    IDLE = auto()
    WANTED = auto()
    HELD = auto()
    OVERDUE = auto()


class LoopPause:
    """A pause of the loop, which another thread requests; at most one at a time."""

    def __init__(self, longest: Seconds = _LONGEST) -> None:
        """`longest`: maximum time that the loop waits."""
        self._longest = longest
        self._state = _State.IDLE
        self._over = False
        self._changed = threading.Condition()

    def turn(self) -> None:
        """Pause if that was requested; called by the loop between two turns."""
        if not self._is(_State.WANTED):
            return
        with self._changed:
            if not self._is(_State.WANTED):
                return
            self._become(_State.HELD)
            if not self._changed.wait_for(lambda: not self._is(_State.HELD), self._longest):
                self._become(_State.OVERDUE)

    def close(self) -> None:
        """Note that the loop ends: no thread need wait for it any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def held(self, comes: Seconds = _COMES) -> Iterator[None]:
        """Keep the loop paused in the block. `comes`: maximum time to wait for the pause.

        Raises Missed, also at the end of the block if the loop has continued before.
        """
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
                f"updates of the standby could not be paused for more than {self._longest:g} s",
                hint="try again when its host is less busy",
            )

    def _is(self, state: _State) -> bool:
        return self._state is state

    def _become(self, state: _State) -> None:
        self._state = state
        self._changed.notify_all()
