"""What a watchdog must know: JSON that it reads from its standard input."""

import json
from dataclasses import asdict, dataclass, field
from typing import Self

from vmckpt.replication.watchdog.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """How to resume the guest if its agent leaves it paused for an epoch."""

    guest: str
    """Its UUID."""
    host: str
    uri: str
    """Its libvirt."""
    undo: str
    """What an epoch changes in QEMU: `migration_settings.Undo` as JSON."""
    lock: str
    """File that an agent at work has locked."""
    logs: tuple[str, ...] = ()
    """Control files of the disks' write logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a watchdog works with."""

    page: str
    """The page's path."""
    qemu: int
    """The `shared_page.identity` of the guest's process."""
    command: tuple[str, ...]
    """Starts the agent again; in the foreground, so that its death is seen."""
    folder: str
    rules: Rules = field(default_factory=Rules)
    resumable: Resumable | None = None
    """None: the guest is never paused for an epoch, as a standby."""
    pair: bool = False
    """It keeps a spare watchdog beside it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if it is none."""
        try:
            told = json.loads(text)
            told["command"] = tuple(told["command"])
            told["rules"] = Rules(**told.get("rules", {}))
            if (paused := told.get("resumable")) is not None:
                told["resumable"] = Resumable(**{**paused, "logs": tuple(paused["logs"])})
            return cls(**told)
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"no facts of a watchdog: {text[:60]!r}") from exc
