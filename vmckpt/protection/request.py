"""The request for a protection, and its result."""

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
    """What decides that a guest's host is dead."""

    LEASE = "lease"
    """The backup, by the lease store."""
    WATCH = "watch"
    """`vmckpt run`, by a fence agent."""
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
    """Paths of the copied disks' images on the target, by disk; both hosts see the other disks."""
    bandwidth: BytesPerSecond | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectRequest:
    """A request to protect a guest with a standby."""

    guest: str
    to: str
    terms: Protection
    """The policy's terms with the options of the command applied."""
    storage: str | None = None
    """Folder on the backup for the standby's images; None: the inventory's default."""
    dry_run: bool = False
    reverse: bool = False
    """The standby is to take over the images that the guest had on the backup before."""
    earlier: Earlier | None = None
    """The protection that these images come from, if it is known."""
    move: Move | None = None
    held: Bytes = Bytes(0)
    """Memory on the guest's host that will be free when the protection begins."""

    @property
    def automatic(self) -> bool:
        """Whether a failover needs no operator; the primary may be stopped for it."""
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
    """The primary's status once the standby was ready; None if nothing was begun."""
    room: Room
    """Space for the disks that are copied, by their virtual size; zeros are not sent."""

    @property
    def disks_bytes(self) -> Bytes:
        """Maximum number of bytes of disks that are copied."""
        return self.room.needed

    def as_json(self) -> dict[str, Any]:
        told = {**asdict(self), "disks_bytes": self.disks_bytes}
        del told["room"]
        return {**told, "findings": [finding.as_json() for finding in self.findings]}
