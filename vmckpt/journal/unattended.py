"""An operation that nobody attends, as the room that puts it in order is given it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.model.recovery import Settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattended:
    """It, and how far it is to be put in order."""

    inventory: Inventory
    operation: Operation
    steps: Sequence[StoredStep]
    recorder: Recorder | None
    """None: only say what would be done."""
    caller: Caller
    adopt: bool
    """What still runs is watched to its end."""

    def step(self, name: str) -> StoredStep | None:
        """The first step of that name; None: it had not come to that."""
        return next((one for one in self.steps if one.name == name), None)

    @property
    def dry(self) -> bool:
        """Nothing may be touched."""
        return self.recorder is None

    @property
    def host(self) -> Host:
        """Where it was at work. Raises InventoryError."""
        return self.inventory.host(self.operation.source or "")

    def ended(self, told: Settled, **more: Any) -> Settled:
        """Write down that it has ended so, if it has, and this is not only a look; `more`: what
        else its report says."""
        if self.recorder is not None and told.outcome is not None and not told.goes_on:
            self.recorder.finish(told.outcome, {**more, "recovered": told.as_json()})
        return told
