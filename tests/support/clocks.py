"""Clocks that a test turns."""


class Clock:
    """A test's to turn."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now
