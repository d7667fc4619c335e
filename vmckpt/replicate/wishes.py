"""What an agent is asked for while it works."""

import threading
from enum import StrEnum

from vmckpt.units import Seconds


class Wish(StrEnum):
    """What can be asked for."""

    END = "end"
    """End the protection; the guest runs on where it is."""
    PLANNED = "planned"
    """Switch to the backup without loss."""
    FAILOVER = "failover"
    """A person says that the primary is dead."""
    TEST = "test"
    """Run a copy of the standby beside it."""
    END_TEST = "end-test"
    ALONE = "alone"
    """Go on without the backup, which will never run the guest; see leave."""


class Wishes:
    """Set by one thread, looked at by another."""

    def __init__(self) -> None:
        self._set: set[Wish] = set()
        self._changed = threading.Condition()

    def add(self, wish: Wish) -> None:
        with self._changed:
            self._set.add(wish)
            self._changed.notify_all()

    def drop(self, wish: Wish) -> None:
        """It cannot be fulfilled."""
        with self._changed:
            self._set.discard(wish)

    def has(self, wish: Wish) -> bool:
        return wish in self._set

    @property
    def any(self) -> bool:
        """Whether something is wished for."""
        return bool(self._set)

    def wait(self, limit: Seconds) -> bool:
        """Until something is wished for, or so long; whether something is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._set), limit)
