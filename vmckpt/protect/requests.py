"""What is asked of a protection, and what came of it."""

from dataclasses import asdict, dataclass
from typing import Any

from vmckpt.model.findings import Finding
from vmckpt.policy.protection import Failover, Protection
from vmckpt.protect.reversing import Earlier
from vmckpt.units import Seconds


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

    def as_json(self) -> dict[str, Any]:
        told = asdict(self)
        return {**told, "findings": [finding.as_json() for finding in self.findings]}
