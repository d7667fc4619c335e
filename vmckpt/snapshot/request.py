"""What a snapshot command is given, what it reports, and its steps in the journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRequest:
    """What the operator asked for."""

    guest: str
    name: str | None = None
    """None: the time."""
    memory: bool = True
    """False: its disks only."""
    way: str = "auto"
    """How memory is captured: see agent.snapshot.choose_method.Way."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A snapshot that is in the store."""

    id: str
    name: str
    guest: str
    host: str
    store: str
    pause: Seconds
    """How long the guest stood still."""
    took: Seconds
    read: Bytes
    same: Bytes
    """As in the snapshot before."""
    zero: Bytes
    written: Bytes
    """What the store took for it."""
    encrypted: bool
    warnings: tuple[str, ...]
    job: str | None
    way: str = "background"
    """How it was captured: "background", "shared", "libvirt", or "disks" without memory."""
    why: str = ""
    """That it was this way."""
    phases: Mapping[str, Seconds] = field(default_factory=dict)
    """What the pause was made of, where that is known."""
    group: str | None = None
    """The cut that it is part of."""
    held: Seconds | None = None
    """How long what the guest sent was held."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "guest": self.guest,
            "host": self.host,
            "store": self.store,
            "pause_ms": round(self.pause * 1000, 1),
            "way": self.way,
            "way_reason": self.why,
            "phases_ms": {name: round(time * 1000, 1) for name, time in self.phases.items()},
            "took_ms": round(self.took * 1000),
            "read_bytes": self.read,
            "same_bytes": self.same,
            "zero_bytes": self.zero,
            "written_bytes": self.written,
            "encrypted": self.encrypted,
            "group": self.group,
            "held_ms": None if self.held is None else round(self.held * 1000, 1),
            "warnings": list(self.warnings),
            "job": self.job,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What the operator asked for."""

    snapshot: str
    """Its id, the beginning of it, or its name."""
    fork: str | None = None
    """The name of another guest that it becomes; None: it takes its old place."""
    folder: str | None = None
    """Where a fork's disks go; None: beside those of the guest."""
    link_up: bool = False
    """A fork's network is on."""
    end_running: bool = False
    """The guest is ended first if it runs."""
    paused: bool = False
    on_restore: str | None = None
    """A line of shell for what must be compensated outside: run here once the guest is back. A
    fork's links come up after it, and stay down if it fails."""
    lazy: bool = False
    """The guest runs at once; its disks come in behind."""
    trust_definition: bool = False
    """Start it whatever its definition reaches on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A guest that is back."""

    snapshot: str
    guest: str
    host: str
    disks: Seconds
    """How long writing its disks took."""
    memory: Seconds
    """From then until it ran."""
    took: Seconds
    images: Mapping[str, str]
    warnings: tuple[str, ...]
    job: str | None
    hook: int | None = None
    """How the on_restore hook ended; None: there is none."""
    whole: bool = True
    """Its disks are all there; False: they still come in."""
    runs: bool = True
    """False: the snapshot has no memory; the guest is defined, and off."""

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot,
            "guest": self.guest,
            "host": self.host,
            "disks_ms": round(self.disks * 1000),
            "memory_ms": round(self.memory * 1000),
            "took_ms": round(self.took * 1000),
            "images": dict(self.images),
            "runs": self.runs,
            "hook_status": self.hook,
            "whole": self.whole,
            "warnings": list(self.warnings),
            "job": self.job,
        }


class Step(StrEnum):
    """What taking a snapshot does to a host, a guest and a store."""

    TAKE = "take"
    """An agent is started; {"snapshot", "store", "url", "id", "state"}; "id" is the store's."""
    CAPTURE = "capture"
    """QEMU is set up for a capture; {"facts"}: what was so before."""
    BACKUP = "backup"
    """libvirt opens a backup; {"facts"}: what it leaves behind."""
    FREEZE = "freeze"
    """The guest's file systems are held still; {"facts"}."""
    HOLD = "hold"
    """What the guest sends is held; {"facts"}."""

    RESTORE = "restore"
    """Disks are written and a guest started; {"snapshot", "store", "url", "state", "images"}, and
    "memory" if it is to be started from it, "on_restore" if something is to follow."""
    MAKE_WAY = "make way"
    """What is there is ended and put aside; {"made", "empty"}: marks of the new images, and where
    nothing was before. Without this step nothing of what is there was touched."""
    HOOK = "hook"
    """What is to follow is run, here: {"on_restore"}."""

    GUARD = "guard"
    """A risky command is run; {"snapshot", "store", "command"}."""
    PROOF = "proof"
    """A fork is restored to be looked at only; {"snapshot", "fork", "images"}."""


NOTED = (Step.CAPTURE, Step.BACKUP, Step.FREEZE, Step.HOLD)
"""Those that the agent asks for, with what its undoing needs to know."""
