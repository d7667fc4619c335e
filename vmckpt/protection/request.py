"""What is asked of a protection, and what came of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from vmckpt.model.disk import Room
from vmckpt.model.finding import Finding
from vmckpt.model.host import Host
from vmckpt.policy.model import Failover, Protection
from vmckpt.protection.resync import Earlier
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class Judge(StrEnum):
    """Who finds out that a guest's host is dead."""

    LEASE = "lease"
    """The backup, by the lease store."""
    WATCH = "watch"
    """Who keeps watch, by a fence agent."""
    PERSON = "person"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Between which hosts, and where leases are kept."""

    primary: Host
    backup: Host
    lease: str | None
    """A PostgreSQL URL; None: a person decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """It is a migration: the guest goes over with an epoch, and is protected no more."""

    images: Mapping[str, str]
    """Where the images of disks that are copied are to be there, by their names in the guest; both
    hosts see the others."""
    bandwidth: BytesPerSecond | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectRequest:
    """Protect a guest by a standby."""

    guest: str
    to: str
    terms: Protection
    """The policy's, and what was said instead."""
    storage: str | None = None
    """Folder on the backup for the standby's images; None: the inventory's first."""
    dry_run: bool = False
    reverse: bool = False
    """The standby is to lie on the images that the guest had there."""
    earlier: Earlier | None = None
    """What is known of those."""
    move: Move | None = None
    held: Bytes = Bytes(0)
    """Memory on the guest's own host that is free by the time it begins."""

    @property
    def automatic(self) -> bool:
        """A dead host is left without asking; the primary may be stopped for that."""
        return self.terms.failover is Failover.AUTOMATIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A protection that was begun, or would be."""

    guest: str
    primary: str
    backup: str
    session: str
    job: str | None
    automatic: bool
    findings: tuple[Finding, ...]
    took: Seconds
    status: dict[str, Any] | None
    """The primary's, once the standby was ready; None: nothing was begun."""
    room: Room
    """What the disks that are copied take, as the guest sees them; what is zero is not sent."""

    @property
    def disks_bytes(self) -> Bytes:
        """As much is copied at most."""
        return self.room.needed

    def as_json(self) -> dict[str, Any]:
        told = {**asdict(self), "disks_bytes": self.disks_bytes}
        del told["room"]
        return {**told, "findings": [finding.as_json() for finding in self.findings]}
