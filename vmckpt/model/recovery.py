"""Results of recovering an orphaned job, and the phases of a group's barrier."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vmckpt.model.migration import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The result of recovering one operation."""

    truth: str
    """The facts found on the hosts, in one sentence."""
    outcome: Outcome | None
    """The operation's outcome; None: the operation has not ended, or its outcome is unknown."""
    did: tuple[str, ...] = ()
    """Actions that were taken, or would be taken in a dry run, in order."""
    settle: str = ""
    """Hint: what to do to settle the operation; empty if there is nothing to do."""
    warnings: tuple[str, ...] = ()
    goes_on: bool = False
    """The operation can continue: recovery leaves it active, or adopts it and follows it to its
    end."""
    two_copies: bool = False
    """The guest is running on two hosts, or on one host while another holds its lease."""

    def as_json(self) -> dict[str, Any]:
        return {
            "truth": self.truth,
            "outcome": str(self.outcome) if self.outcome is not None else None,
            "did": list(self.did),
            "hint": self.settle or None,
            "settle": self.settle or None,
            "continues": self.goes_on,
            "goes_on": self.goes_on,
            "warnings": list(self.warnings),
            "two_copies": self.two_copies,
        }


class Phase(StrEnum):
    """A phase that all guests of a group must reach before any of them continues."""

    READY = "ready"
    """The capture is prepared; the guest is not affected yet."""
    STOPPED = "stopped"
    """The guest is paused, and its output is buffered."""
    CAPTURED = "captured"
    """The checkpoint is taken; the guest may run, and its output is still buffered."""
    STORED = "stored"
    """Everything except the manifest is in the store."""
