"""Choose what clients of a guest's key-value store request, and when. Pure.

Each client waits for the answer to an operation, pauses for a moment, and begins the next
operation. A client repeats a request without an answer, and gives up after a while: the operation
then stays pending, and the client begins the next operation.
"""

import random
from collections.abc import MutableMapping
from dataclasses import dataclass

from vmckpt_lab.history.history import Input, Kind

THINKS = (0.01, 0.06)
"""Minimum and maximum time between an answer and the client's next operation, in seconds."""
ASKS_AGAIN = 0.5
"""Seconds after which a request is repeated. A protected guest's answers wait for its epoch."""
GIVES_UP = 3.0
"""Seconds after which a client gives up an operation. The operation stays pending."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send."""

    sequence: int
    asked: Input
    again: bool
    """Whether the request was sent before."""


class Client:
    """A client. `due` returns the request to send; `hear` processes an answer."""

    def __init__(
        self, number: int, keys: int, dice: random.Random, seen: MutableMapping[int, int]
    ) -> None:
        """`seen`: last known value of each key, as expected by CAS; shared by all clients."""
        self.number = number
        self._keys, self._dice, self._seen = keys, dice, seen
        self._sequence = 0
        self._asked: Input | None = None
        self._called = 0.0
        self.wakes = 0.0
        """Earliest time at which `due` can return a request, in seconds."""

    @property
    def waits(self) -> bool:
        """Whether the last operation is not answered yet."""
        return self._asked is not None

    def due(self, now: float, *, begin: bool = True) -> Ask | None:
        """Return the request to send now, or None. Without `begin`, only repeats requests."""
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
        """Process an answer. Answers to earlier operations are ignored.

        `sequence`: number of the operation; `before`: the key's value before the operation; `now`:
        in seconds.
        """
        asked = self._asked
        if asked is None or sequence != self._sequence:
            return
        wrote = asked.kind is Kind.WRITE or (asked.kind is Kind.CAS and asked.expected == before)
        self._seen[asked.key] = asked.value if wrote else before
        self._asked = None
        self.wakes = now + self._dice.uniform(*THINKS)

    def _drawn(self) -> Input:
        """Draw the next operation. The last key is a counter; all others are registers."""
        key = self._dice.randrange(self._keys)
        chance = self._dice.random()
        if key == self._keys - 1:
            return Input(kind=Kind.ADD, key=key, value=1) if chance < 0.7 else _read(key)
        # Every operation writes a unique value, so that an answer identifies the write it saw.
        value = (self.number + 1) << 32 | self._sequence
        if chance < 0.35:
            return Input(kind=Kind.WRITE, key=key, value=value)
        if chance < 0.7:
            expected = self._seen.get(key, 0)
            return Input(kind=Kind.CAS, key=key, value=value, expected=expected)
        return _read(key)


def _read(key: int) -> Input:
    return Input(kind=Kind.READ, key=key)
