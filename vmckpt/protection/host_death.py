"""Decide whether a guest's standby may run, usually because its host is proven dead. Pure.

Silence proves nothing: the network to the host may be down while the guest still runs there.
"""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.errors import BadInput, GuestLocked
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds

LIVES = Seconds(3.0)
"""A host with a heartbeat newer than this is not dead; its agent sends ten heartbeats a second."""
_READY = "protecting"


class Proof(StrEnum):
    """Why the standby may run."""

    RUNS = "runs"
    """The standby is already running."""
    LEASE = "lease"
    """The backup waits until the lease expires."""
    WORD = "word"
    """The operator states that the host is off."""
    FENCE = "fence"
    """vmckpt powers the host off first."""
    GONE = "gone"
    """The host reports that it has no QEMU process of the guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A failover that was requested, with the answers of both agents."""

    guest: str
    primary: str
    backup: str
    ours: ProtectionStatus
    """The primary's answer; see agent_client.status."""
    theirs: ProtectionStatus
    """The backup's answer. If the primary did not answer, this was requested after that."""
    has_lease: bool
    has_fence: bool
    word: bool
    """The operator states that the host is off."""
    fence: bool
    """The operator wants the host to be powered off, even if it answers."""
    watched: bool = False
    """`vmckpt run` decides about failovers, so the journal records all permissions."""
    alone: bool = False
    """The primary had permission to continue without its standby, and may have done so."""

    @property
    def silent(self) -> bool:
        """Whether neither the controller nor the backup receives anything from the primary."""
        heard = self.theirs.silent_for
        return self.ours.silent and (heard is None or heard > LIVES)

    @property
    def gone(self) -> bool:
        """Whether the primary's host answers and the guest is no longer running there.

        Either QEMU died, or the guest was switched over, or the host has restarted. If the guest
        may have continued without its standby, the result is True only if the journal records all
        permissions. A guest that has stopped otherwise does not count: it may have been shut down
        on request.
        """
        told = self.ours
        if told.runs is not False:
            return False
        if told.outcome in (ProtectionOutcome.DIED, ProtectionOutcome.SWITCHED):
            return self.watched or not told.alone
        return self.watched and told.knows_nothing


def decide(case: Case) -> Proof:
    """Return the proof that the standby may run.

    Raises GuestLocked or BadInput if there is no proof, with a hint on how to provide it.
    """
    runs = case.ours.error is None and case.ours.runs
    followed = case.theirs.connected or not case.has_lease
    if runs and followed and not case.fence:
        also = f"; if {case.primary} hangs, --fence powers it off first" if case.has_fence else ""
        raise GuestLocked(
            f"{case.guest} is running on {case.primary}, which answers",
            hint=f"run vmckpt failover {case.guest} --planned to switch over without loss{also}",
        )
    if case.theirs.outcome == ProtectionOutcome.FAILED_OVER:
        return Proof.RUNS
    if case.fence:
        return _fence(case)
    if case.has_lease:
        return Proof.LEASE
    if case.word:
        return _by_word(case)
    if case.gone:
        return _gone(case)
    if not case.has_fence:
        raise BadInput(
            f"{case.guest} is protected without a lease, and {case.primary} has no fence agent, so"
            f" vmckpt cannot know that {case.primary} is off",
            hint="switch it off, then add --host-is-off",
        )
    if not case.silent:
        raise BadInput(
            f"{case.primary} is not silent ({_heard(case)}), so it is fenced only on request",
            hint="add --fence to power it off, with all guests on it",
        )
    return _fence(case)


def _by_word(case: Case) -> Proof:
    """Check the operator's statement: a host that still sends heartbeats is not off.

    Raises GuestLocked.
    """
    heard = case.theirs.silent_for
    if case.theirs.connected and heard is not None and heard < LIVES:
        raise GuestLocked(
            f"{case.primary} is not off: {case.backup} still receives heartbeats of {case.guest}",
            hint=f"switch it off first, or run vmckpt doctor {case.primary} to find out why it does"
            " not answer",
        )
    return Proof.WORD


def _gone(case: Case) -> Proof:
    _must_be_ready(case, f"{case.guest} is no longer running on {case.primary}")
    if case.alone:
        raise GuestLocked(
            f"{case.guest} is not running on any host, and its standby on {case.backup} may be"
            " outdated: the guest had permission to run unprotected",
            hint="add --host-is-off to run the standby as it is, or discard it with"
            f" vmckpt unprotect {case.guest}",
        )
    return Proof.GONE


def _fence(case: Case) -> Proof:
    """Return the proof FENCE, unless the standby could not run or may be outdated.

    Raises BadInput without a fence agent, and GuestLocked if the host must not be powered off.
    """
    if not case.has_fence:
        raise BadInput(
            f"{case.primary} has no fence agent in the inventory",
            hint=f"add fence: {{agent: ..., options: {{...}}}} to {case.primary}",
        )
    _must_be_ready(case, f"{case.primary} is not fenced")
    if case.alone:
        raise GuestLocked(
            f"{case.primary} is not fenced: {case.guest} had permission to run unprotected there,"
            f" so the standby on {case.backup} may be outdated",
            hint=f"wait until {case.primary} answers, or switch it off and add --host-is-off",
        )
    phase = case.ours.phase or _READY
    if case.ours.runs and phase != _READY:
        raise GuestLocked(
            f"{case.primary} is not fenced: {case.guest} is running there, and its standby on"
            f" {case.backup} is outdated ({phase})",
            hint=f"run vmckpt doctor {case.backup}, and check the link between the hosts; once both"
            " work, the standby synchronises automatically",
        )
    return Proof.FENCE


def _must_be_ready(case: Case, now: str) -> None:
    if not case.theirs.ready or case.theirs.runs is False:
        why = case.theirs.error or case.theirs.says or "no reason reported"
        raise GuestLocked(
            f"{now}: the standby on {case.backup} is not ready: {why}",
            hint=f"run vmckpt status {case.guest}",
        )


def _heard(case: Case) -> str:
    if not case.ours.silent:
        return str(case.ours.error or "its agent answers")
    return f"{case.backup} still receives heartbeats from it"
