"""Pause the backup's loop while another thread needs the standby unchanged.

Between two iterations of the loop, memory, disks and device state belong to the same epoch. The
loop is paused only briefly, since the primary waits for it.
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
    """Pauses the backup's loop when another thread requests this; one request at a time."""

    def __init__(self, longest: Seconds = _LONGEST) -> None:
        """`longest`: maximum time for which the loop is paused."""
        self._longest = longest
        self._state = _State.IDLE
        self._over = False
        self._changed = threading.Condition()

    def turn(self) -> None:
        """Pause if a pause was requested. The loop calls this between two iterations."""
        if not self._is(_State.WANTED):
            return
        with self._changed:
            if not self._is(_State.WANTED):
                return
            self._become(_State.HELD)
            if not self._changed.wait_for(lambda: not self._is(_State.HELD), self._longest):
                self._become(_State.OVERDUE)

    def close(self) -> None:
        """Record that the loop has ended, so that no thread waits for it any longer."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def held(self, comes: Seconds = _COMES) -> Iterator[None]:
        """Keep the loop paused inside the block. `comes`: maximum time to wait for the pause.

        Raises Missed, also at the end of the block if the loop has already continued.
        """
        with self._changed:
            self._become(_State.WANTED)
            self._changed.wait_for(lambda: self._is(_State.HELD) or self._over, comes)
            if not self._is(_State.HELD):
                self._become(_State.IDLE)
                raise Missed("the standby is busy, or the protection is ending")
        try:
            yield
        finally:
            with self._changed:
                overdue = self._is(_State.OVERDUE)
                self._become(_State.IDLE)
        if overdue:
            raise Missed(
                "the test would have paused updates of the standby for more than"
                f" {self._longest:g} s",
                hint="try again when the standby's host is less busy",
            )

    def _is(self, state: _State) -> bool:
        return self._state is state

    def _become(self, state: _State) -> None:
        self._state = state
        self._changed.notify_all()
