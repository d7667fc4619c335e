"""A host's answer about a guest's protection, as the fields that decisions read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionStatus:
    """One host's answer. A field that the host did not send is None, or False if it is a flag."""

    error: str | None = None
    """Why the host could not be queried; all other fields except `silent` are then empty."""
    silent: bool = False
    """Nothing answered at the host's address."""
    role: str | None = None
    """Either "primary" or "backup"; None if the host knows of no protection."""
    session: str | None = None
    peer: str | None = None
    """The protection's other host."""
    runs: bool | None = None
    """Whether the host has a QEMU process of the guest."""
    agent: bool | None = None
    """Whether the protection's agent answers."""
    phase: str | None = None
    """The primary's phase; see replication.status.Phase."""
    outcome: str | None = None
    """How the protection ended; None if it is active; see replication.session.ProtectionOutcome."""
    why: str | None = None
    """Why the protection ended."""
    says: str | None = None
    """What prevents the protection from working."""
    alone: bool = False
    """The primary continued without its standby."""
    wants_leave: str | None = None
    """The name of the primary's request for permission to run unprotected; None: no request."""
    devices_changed: bool = False
    ready: bool = False
    """The standby can take over."""
    connected: bool = False
    """The backup is connected to the primary."""
    silent_for: float | None = None
    """Seconds since the backup last received anything from the primary."""
    epoch_age: float | None = None
    """Seconds since the capture of the backup's last epoch."""
    ran: bool = False
    """The standby has run as the guest, now or earlier."""
    given: bool = False
    """The primary has handed the guest over."""
    has_lease: bool = False
    lease_holder: str | None = None
    """For a primary without an agent: the host that holds the lease."""
    moves: bool | None = None
    """Whether this is a migration by epochs; None: an older release does not report this."""
    known: bool = False
    """Without a protection: whether libvirt has a domain of the guest."""
    libvirt_silent: bool = False
    """Without a protection: libvirt did not report whether it has a domain of the guest."""
    told: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The complete answer, for display."""

    @property
    def knows_nothing(self) -> bool:
        """Whether the host answers and has no protection of the guest."""
        return self.error is None and self.role is None

    def stopped_because(self, host: str, what: str) -> str:
        """Return why `host`, which sent this answer, does not run the guest.

        `what`: "protection" or "migration".
        """
        if self.knows_nothing:  # /run/vmckpt is empty after a restart
            return f"{host} has no record of the {what}; {host} may have restarted"
        return self.why or self.says or "the reason is unknown"


def parse_answer(told: Mapping[str, Any]) -> ProtectionStatus:
    """Build a ProtectionStatus from an answer that agent_answers has checked."""
    plain = (
        "error", "role", "session", "peer", "runs", "agent", "phase", "outcome", "why", "says",
        "wants_leave", "lease_holder", "moves",
    )  # fmt: skip
    flags = ("silent", "alone", "devices_changed", "ready", "connected", "ran", "has_lease")
    values: dict[str, Any] = {name: told.get(name) for name in plain}
    values |= {name: bool(told.get(name)) for name in flags}
    return ProtectionStatus(
        **values, silent_for=told.get("silent_s"), epoch_age=told.get("epoch_age_s"),
        given="given" in told, known=bool(told.get("known")),
        libvirt_silent="known" in told and told["known"] is None, told=told,
    )  # fmt: skip
