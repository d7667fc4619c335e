"""What makes sure that a guest's host is dead, before its standby may run. Pure.

Silence proves nothing: the host may be cut off, with the guest running on it.
"""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.errors import BadInput, GuestLocked
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds

LIVES = Seconds(3.0)
"""An agent beats ten times a second: who was heard that lately is not dead."""
_READY = "protecting"


class Proof(StrEnum):
    """Why the standby may run."""

    RUNS = "runs"
    """It runs already."""
    LEASE = "lease"
    """The lease's end is waited for."""
    WORD = "word"
    """A person says that the host is off."""
    FENCE = "fence"
    """The host is powered off first."""
    GONE = "gone"
    """Its host says that no QEMU of it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A failover that is asked for, and what both agents say."""

    guest: str
    primary: str
    backup: str
    ours: ProtectionStatus
    """The primary's answer; see agent_client.status."""
    theirs: ProtectionStatus
    """The backup's, asked for after it."""
    has_lease: bool
    has_fence: bool
    word: bool
    """A person says that the host is off."""
    fence: bool
    """A person wants it powered off, even if it answers."""
    watched: bool = False
    """Somebody keeps watch, and the journal knows of leave."""
    alone: bool = False
    """The primary had leave to go on without its standby, and may have."""

    @property
    def silent(self) -> bool:
        """Nothing has come from the primary, neither to us nor to the backup."""
        heard = self.theirs.silent_for
        return self.ours.silent and (heard is None or heard > LIVES)

    @property
    def gone(self) -> bool:
        """The primary's host answers, and the guest runs there no more: its QEMU died, or stood for
        a switch. Of a host that was started anew the journal must know that the guest had not gone
        on alone before. A guest that is just ending may be one that somebody shuts down."""
        told = self.ours
        if told.runs is not False:
            return False
        if told.outcome in (ProtectionOutcome.DIED, ProtectionOutcome.SWITCHED):
            return self.watched or not told.alone
        return self.watched and told.knows_nothing


def decide(case: Case) -> Proof:
    """Raises GuestLocked, BadInput: nothing makes sure of it, and what would."""
    runs = case.ours.error is None and case.ours.runs
    followed = case.theirs.connected or not case.has_lease
    if runs and followed and not case.fence:
        also = f"; if {case.primary} hangs, --fence powers it off first" if case.has_fence else ""
        raise GuestLocked(
            f"{case.guest} runs on {case.primary}, which answers",
            hint=f"vmckpt failover {case.guest} --planned switches without loss{also}",
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
            f"{case.primary} is silent, and without a lease store nobody but you can"
            " know that it is dead",
            hint="switch it off, then add --host-is-off",
        )
    if not case.silent:
        raise BadInput(
            f"{case.primary} is not silent ({_heard(case)}), and is not fenced unasked",
            hint="add --fence to have it powered off, with all that runs there",
        )
    return _fence(case)


def _by_word(case: Case) -> Proof:
    """A person may err: whoever is heard is not off."""
    heard = case.theirs.silent_for
    if case.theirs.connected and heard is not None and heard < LIVES:
        raise GuestLocked(
            f"{case.primary} is not off: {case.backup} hears of {case.guest} there",
            hint=f"switch it off first; vmckpt failover {case.guest} --planned loses nothing",
        )
    return Proof.WORD


def _gone(case: Case) -> Proof:
    _must_be_ready(case, f"{case.guest} runs nowhere")
    if case.alone:
        raise GuestLocked(
            f"{case.guest} runs nowhere, and had leave to go on without {case.backup}: the standby"
            " there is behind it",
            hint=f"add --host-is-off to go on from what {case.backup} has; vmckpt unprotect"
            f" {case.guest} gives that up",
        )
    return Proof.GONE


def _fence(case: Case) -> Proof:
    """Nobody is powered off for a standby that could not go on, or is not the guest any more."""
    if not case.has_fence:
        raise BadInput(
            f"{case.primary} has no fence agent in the inventory",
            hint=f"add fence: {{agent: ..., options: {{...}}}} to {case.primary}",
        )
    _must_be_ready(case, f"{case.primary} is not fenced")
    if case.alone:
        raise GuestLocked(
            f"{case.primary} is not fenced: {case.guest} had leave to go on there without"
            f" {case.backup}, whose standby is behind it",
            hint=f"wait until {case.primary} answers; or switch it off and add --host-is-off",
        )
    phase = case.ours.phase or _READY
    if case.ours.runs and phase != _READY:
        raise GuestLocked(
            f"{case.primary} is not fenced: {case.guest} runs there, and its standby on"
            f" {case.backup} is behind it ({phase})",
            hint=f"mend {case.backup} or the link first; the standby is brought up by itself",
        )
    return Proof.FENCE


def _must_be_ready(case: Case, now: str) -> None:
    if not case.theirs.ready or case.theirs.runs is False:
        why = case.theirs.error or case.theirs.says or "it says nothing"
        raise GuestLocked(
            f"{now}: the standby on {case.backup} is not ready: {why}", hint="see vmckpt status"
        )


def _heard(case: Case) -> str:
    if not case.ours.silent:
        return str(case.ours.error or "its agent answers")
    return f"{case.backup} still hears of it"
