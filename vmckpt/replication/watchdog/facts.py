"""The facts that a watchdog reads as JSON from standard input."""

import json
from dataclasses import asdict, dataclass, field
from typing import Self

from vmckpt.replication.watchdog.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """How to resume the guest if its agent leaves it paused for an epoch."""

    guest: str
    """The guest's UUID."""
    host: str
    uri: str
    """libvirt URI of the host."""
    undo: str
    """What an epoch changes in QEMU: `migration_settings.Undo` as JSON."""
    lock: str
    """Path of the file that a working agent keeps locked."""
    logs: tuple[str, ...] = ()
    """Paths of the control files of the disks' write logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one watchdog."""

    page: str
    """Path of the shared page."""
    qemu: int
    """The `shared_page.identity` of the guest's QEMU process."""
    command: tuple[str, ...]
    """The command that runs the agent, in the foreground so that its exit is noticed."""
    folder: str
    rules: Rules = field(default_factory=Rules)
    resumable: Resumable | None = None
    """How to resume the guest; None: the watchdog does not resume the guest."""
    pair: bool = False
    """The watchdog keeps a spare watchdog running."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of `to_json`. Raises ValueError if it is invalid."""
        try:
            told = json.loads(text)
            told["command"] = tuple(told["command"])
            told["rules"] = Rules(**told.get("rules", {}))
            if (paused := told.get("resumable")) is not None:
                told["resumable"] = Resumable(**{**paused, "logs": tuple(paused["logs"])})
            return cls(**told)
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"invalid watchdog facts: {text[:60]!r}") from exc
