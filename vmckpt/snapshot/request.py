"""The requests and results of snapshot commands, and their steps in the journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRequest:
    """A request to take a snapshot."""

    guest: str
    name: str | None = None
    """Name of the snapshot; None: the current time."""
    memory: bool = True
    """Whether memory is captured; if not, only disks are."""
    way: str = "auto"
    """The method of capturing memory: see agent.snapshot.choose_method.MemoryMethod."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A snapshot that was taken and stored."""

    id: str
    name: str
    guest: str
    host: str
    store: str
    pause: Seconds
    """How long the guest was paused."""
    took: Seconds
    read: Bytes
    same: Bytes
    """Bytes unchanged since the previous snapshot."""
    zero: Bytes
    written: Bytes
    """Bytes added to the store."""
    encrypted: bool
    warnings: tuple[str, ...]
    job: str | None
    way: str = "background"
    """The capture method: "tracking", "background", "shared", "libvirt"; "disks" without memory."""
    why: str = ""
    """Why this method was used."""
    phases: Mapping[str, Seconds] = field(default_factory=dict)
    """Durations of the phases of the pause, by name, as far as they are known."""
    group: str | None = None
    """ID of the group snapshot to which the snapshot belongs."""
    held: Seconds | None = None
    """How long the guest's network output was buffered."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "guest": self.guest,
            "host": self.host,
            "store": self.store,
            "pause_ms": round(self.pause * 1000, 1),
            "memory_method": self.way,
            "memory_method_reason": self.why,
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
    """A request to restore a snapshot."""

    snapshot: str
    """The snapshot's ID, a prefix of the ID, or its name."""
    fork: str | None = None
    """Name of the fork to create; None: restore the original guest."""
    folder: str | None = None
    """Directory for a fork's disks; None: next to the disks of the original guest."""
    link_up: bool = False
    """Whether a fork's network links are up."""
    end_running: bool = False
    """Whether the guest is stopped first if it is running."""
    paused: bool = False
    on_restore: str | None = None
    """A shell command that compensates for effects outside the guest. It is run on the controller
    after the restore. A fork's links come up after the command, and stay down if it fails."""
    lazy: bool = False
    """Whether the guest starts at once, while its disks are still being restored."""
    trust_definition: bool = False
    """Whether to start the guest regardless of the host resources that its definition uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A guest that was restored."""

    snapshot: str
    guest: str
    host: str
    disks: Seconds
    """Time taken to write the guest's disks."""
    memory: Seconds
    """Time from the end of writing the disks until the guest was running."""
    took: Seconds
    images: Mapping[str, str]
    warnings: tuple[str, ...]
    job: str | None
    hook: int | None = None
    """Exit status of the on_restore hook, or -N if signal N killed the hook; None: no hook."""
    whole: bool = True
    """Whether the guest's disks are complete; if not, they are still being restored."""
    runs: bool = True
    """Whether the guest was started; if not, the snapshot has no memory, and the guest is off."""
    links_down: str = ""
    """Why a fork's links are down although they should be up; empty: they are as requested."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """Path of the base image of each disk that is an overlay, by disk name."""
    clock_not_set: str = ""
    """Why the guest's clock still has the time of the snapshot; empty: it was set."""

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
            "links_down": self.links_down,
            "clock_not_set": self.clock_not_set,
            "bases": dict(self.bases),
            "warnings": list(self.warnings),
            "job": self.job,
        }


class Step(StrEnum):
    """Steps of snapshot operations in the journal, each with the keys of its intent."""

    TAKE = "take"
    """Start an agent; {"snapshot", "store", "url", "id", "state"}; "id" is the store's ID."""
    CAPTURE = "capture"
    """Set up QEMU for a capture; {"facts"}: its previous settings."""
    BACKUP = "backup"
    """Start a backup in libvirt; {"facts"}: what the backup leaves behind."""
    FREEZE = "freeze"
    """Freeze the guest's file systems; {"facts"}."""
    HOLD = "hold"
    """Buffer the guest's network output; {"facts"}."""

    RESTORE = "restore"
    """Write disks and start a guest; {"snapshot", "store", "url", "state", "images"}, "memory":
    whether the guest is started from its saved memory, and "on_restore" if there is a hook."""
    MAKE_WAY = "make way"
    """Stop the existing guest and replace its images; {"made", "empty"}: marks of the new images,
    and paths at which no file existed. Without this step, nothing that existed was changed."""
    HOOK = "hook"
    """Run the on_restore hook on the controller; {"on_restore"}."""

    GUARD = "guard"
    """Run a risky command; {"snapshot", "store", "command"}."""
    PROOF = "proof"
    """Restore a fork for a boot test; {"snapshot", "fork", "images"}."""
    FORK = "fork"
    """Start a family of forks; {"family", "snapshot", "store", "guests"}: UUIDs of the forks."""
    CARDS = "cards"
    """Replace network cards of a running guest; {"cards"}: their MAC addresses."""


NOTED = (Step.CAPTURE, Step.BACKUP, Step.FREEZE, Step.HOLD)
"""Steps that the agent asks the controller to record, with the facts needed to undo them."""
