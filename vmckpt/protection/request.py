"""The request for a protection, and its result."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from vmckpt.model.disk import Room
from vmckpt.model.epoch_cost import Finder
from vmckpt.model.finding import Finding
from vmckpt.model.host import Host
from vmckpt.policy.model import Failover, Protection
from vmckpt.protection.resync import Earlier
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class Judge(StrEnum):
    """What decides that a guest's host is dead."""

    LEASE = "lease"
    """The backup, by means of the lease store."""
    WATCH = "watch"
    """`vmckpt run`, by means of a fence agent."""
    PERSON = "person"
    """The operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The two hosts, and the lease store."""

    primary: Host
    backup: Host
    lease: str | None
    """A PostgreSQL URL; None if there is no lease store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A migration: the guest switches over after an epoch and is not protected afterwards."""

    images: Mapping[str, str]
    """Image path on the target of each copied disk, by disk name; the other disks are shared."""
    bandwidth: BytesPerSecond | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectRequest:
    """A request to protect a guest with a standby."""

    guest: str
    to: str
    terms: Protection
    """The policy's terms with the options of the command applied."""
    storage: str | None = None
    """Directory on the backup for the standby's images; None: the inventory's default, else the
    directories of the guest's images."""
    finder: Finder | None = None
    """The method for finding changed pages; None: the best method that works for the guest."""
    dry_run: bool = False
    reverse: bool = False
    """The standby is to take over the images that the guest previously used on the backup."""
    earlier: Earlier | None = None
    """The earlier protection whose images the standby takes over; None if unknown."""
    move: Move | None = None
    held: Bytes = Bytes(0)
    """Memory on the guest's host that will have been freed when the protection begins."""

    @property
    def automatic(self) -> bool:
        """Whether vmckpt fails over without an operator. This may kill the guest on the primary."""
        return self.terms.failover is Failover.AUTOMATIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A protection that was started, or the plan of one."""

    guest: str
    primary: str
    backup: str
    session: str
    job: str | None
    automatic: bool
    findings: tuple[Finding, ...]
    took: Seconds
    status: dict[str, Any] | None
    """The primary's status once the standby was ready; None if no protection was started."""
    rooms: tuple[Room, ...]
    """Space for the new images, by virtual size, on each of the backup's file systems; zeros are
    not sent."""
    expected_pause: Seconds | None = None
    """How long an epoch is expected to pause the guest; None: this was not measured."""

    @property
    def disks_bytes(self) -> Bytes:
        """Maximum number of disk bytes that are copied to new images."""
        return Bytes(sum(room.needed for room in self.rooms))

    def as_json(self) -> dict[str, Any]:
        told = {**asdict(self), "disks_bytes": self.disks_bytes}
        del told["rooms"]
        return {**told, "findings": [finding.as_json() for finding in self.findings]}
