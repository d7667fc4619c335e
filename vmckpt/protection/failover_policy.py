"""Decide about the failover of a guest with a fence agent and without a lease store. Pure.

`vmckpt run` must monitor such a guest, because the fence agent runs on the controller's machine.
The same service also grants the permission to run unprotected while the host is up, so that a guest
is never both fenced and permitted to run unprotected.
"""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.protection.host_death import LIVES, Case
from vmckpt.protection.steps import READY
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds


class FailoverAction(StrEnum):
    """The next action for a guest."""

    WAIT = "wait"
    GRANT_SOLO = "let alone"
    """Grant the primary's request to continue without its standby."""
    STANDBY_RESTORED = "stands"
    """Record that the standby is complete again, so a failover is possible."""
    FAIL_OVER = "fail over"
    """Fail over as `stop.failover` does, which first powers a silent host off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverDecision:
    """What to do, and why, for display."""

    do: FailoverAction
    why: str = ""
    """The reason for the action, or what is wrong; empty if nothing is wrong."""


def decide(case: Case, *, patience: Seconds) -> FailoverDecision:
    """Return what to do, decided from the answers of both agents.

    `patience`: how long the host must be silent before it counts as dead; at least `LIVES`, so that
    a few lost heartbeats are not mistaken for a dead host.
    """
    ours, theirs = case.ours, case.theirs
    if theirs.outcome == ProtectionOutcome.FAILED_OVER:
        if ours.runs:
            return _wait(
                f"it has failed over to {case.backup}, but is also running on {case.primary}"
            )
        return FailoverDecision(
            do=FailoverAction.FAIL_OVER, why=f"it has failed over to {case.backup}"
        )
    if ours.wants_leave:
        said = str(ours.says or "").partition(": ")[2] or ours.says or "no reason reported"
        return FailoverDecision(
            do=FailoverAction.GRANT_SOLO, why=f"it continues without {case.backup}: {said}"
        )
    if case.alone:
        if ours.phase == READY and theirs.connected:
            return FailoverDecision(
                do=FailoverAction.STANDBY_RESTORED,
                why=f"its standby on {case.backup} is complete again",
            )
        return _wait(f"it may have continued without {case.backup}; fail over manually if needed")
    return _by_silence(case, patience) if case.gone or case.silent else _wait()


def _by_silence(case: Case, patience: Seconds) -> FailoverDecision:
    theirs = case.theirs
    if not theirs.ready or theirs.runs is False:
        says = theirs.error or theirs.says or "no reason reported"
        return _wait(f"its standby on {case.backup} is not ready: {says}")
    if case.gone:
        return FailoverDecision(
            do=FailoverAction.FAIL_OVER, why=f"it is no longer running on {case.primary}"
        )
    silent = Seconds(float(theirs.silent_for or 0.0))
    if silent < max(patience, LIVES):
        return _wait(f"{case.primary} does not answer")
    return FailoverDecision(
        do=FailoverAction.FAIL_OVER,
        why=f"{case.primary} does not answer, and {case.backup} has received nothing from it for"
        f" {silent:.0f} s",
    )  # fmt: skip


def _wait(why: str = "") -> FailoverDecision:
    return FailoverDecision(do=FailoverAction.WAIT, why=why)
