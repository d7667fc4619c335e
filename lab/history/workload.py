"""What the clients of a guest's key-value store ask for, and when they ask again. Pure.

Each client waits for the answer to one operation, pauses for a moment, and begins the next.
It repeats a request that is not answered soon, and gives it up after a while: then the operation
stays pending, and the client begins another one.
"""

import random
from collections.abc import MutableMapping
from dataclasses import dataclass

from vmckpt_lab.history.history import Input, Kind

THINKS = (0.01, 0.06)
"""Seconds between an answer and the client's next operation, at least and at most."""
ASKS_AGAIN = 0.5
"""Seconds after which a request is repeated. Answers of a protected guest wait for its epoch."""
GIVES_UP = 3.0
"""Seconds after which an operation is left pending."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request."""

    sequence: int
    asked: Input
    again: bool
    """It was sent before."""


class Client:
    """One client. Feed it the time and what it heard; it says what to send."""

    def __init__(
        self, number: int, keys: int, dice: random.Random, seen: MutableMapping[int, int]
    ) -> None:
        """Clients that share `seen`, the last known value of each key, compare with it."""
        self.number = number
        self._keys, self._dice, self._seen = keys, dice, seen
        self._sequence = 0
        self._asked: Input | None = None
        self._called = 0.0
        self.wakes = 0.0
        """When it has something to do next, seconds."""

    @property
    def waits(self) -> bool:
        """Whether its last operation is not answered."""
        return self._asked is not None

    def due(self, now: float, *, begin: bool = True) -> Ask | None:
        """What it sends now, if anything. Without `begin` it only repeats what it waits for."""
        if now < self.wakes:
            return None
        asked, again = self._asked, True
        if asked is None or now - self._called > GIVES_UP:
            if not begin:
                self.wakes = now + ASKS_AGAIN
                return None
            self._sequence += 1
            self._called = now
            asked, again = self._drawn(), False
        self._asked = asked
        self.wakes = now + ASKS_AGAIN
        return Ask(self._sequence, asked, again)

    def hear(self, sequence: int, before: int, now: float) -> None:
        """Take an answer; one to an earlier operation changes nothing."""
        asked = self._asked
        if asked is None or sequence != self._sequence:
            return
        wrote = asked.kind is Kind.WRITE or (asked.kind is Kind.CAS and asked.expected == before)
        self._seen[asked.key] = asked.value if wrote else before
        self._asked = None
        self.wakes = now + self._dice.uniform(*THINKS)

    def _drawn(self) -> Input:
        """The next operation. The last key is a counter, all others are registers."""
        key = self._dice.randrange(self._keys)
        chance = self._dice.random()
        if key == self._keys - 1:
            return Input(kind=Kind.ADD, key=key, value=1) if chance < 0.7 else _read(key)
        # No two operations write the same value, so that an answer tells which one it saw.
        value = (self.number + 1) << 32 | self._sequence
        if chance < 0.35:
            return Input(kind=Kind.WRITE, key=key, value=value)
        if chance < 0.7:
            expected = self._seen.get(key, 0)
            return Input(kind=Kind.CAS, key=key, value=value, expected=expected)
        return _read(key)


def _read(key: int) -> Input:
    return Input(kind=Kind.READ, key=key)
