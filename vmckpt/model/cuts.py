"""What the two sides of a cut through several guests call its phases."""

from enum import StrEnum


class Phase(StrEnum):
    """What all guests of a group have reached before any of them goes on."""

    READY = "ready"
    """All is noted; nothing was changed that the guest would feel."""
    STOPPED = "stopped"
    """It stands still, and its output is held."""
    CAPTURED = "captured"
    """Its instant is taken; it may run, and its output is still held."""
    STORED = "stored"
    """All of it is in the store but its manifest."""
