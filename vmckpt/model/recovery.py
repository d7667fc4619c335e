"""What recovery found of an unattended operation and did; phases of a group's barrier."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vmckpt.model.migration import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """One operation after a look at its hosts."""

    truth: str
    """What is true, in a sentence."""
    outcome: Outcome | None
    """How the operation has ended; None: it has not, or nobody can tell."""
    did: tuple[str, ...] = ()
    """What was done, or would be; in this order."""
    settle: str = ""
    """What would settle it; empty if it is."""
    warnings: tuple[str, ...] = ()
    goes_on: bool = False
    """A migration still runs in libvirt: whoever wants to wait for its end adopts it."""
    two_copies: bool = False
    """The guest runs on two hosts, or on one while another holds its lease."""

    def as_json(self) -> dict[str, Any]:
        return {
            "truth": self.truth,
            "outcome": str(self.outcome) if self.outcome is not None else None,
            "did": list(self.did),
            "settle": self.settle or None,
            "goes_on": self.goes_on,
            "warnings": list(self.warnings),
            "two_copies": self.two_copies,
        }


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
