"""What is done about a protected guest that no lease store, but a fence agent, decides about. Pure.

Somebody has to keep watch over it: what powers its host off is on the controller's machine. The
same one lets the guest go on alone while its host is there, so that never both are done.
"""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.protection.host_death import LIVES, Case
from vmckpt.protection.steps import READY
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds


class FailoverAction(StrEnum):
    """What is done now."""

    WAIT = "wait"
    GRANT_SOLO = "let alone"
    """The primary wants leave to go on without its standby, and answers: it gets it."""
    STANDBY_RESTORED = "stands"
    """Its standby is whole again: it is written down that a failover may be."""
    FAIL_OVER = "fail over"
    """As `stop.failover` does it: the host is powered off first, unless the guest is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverDecision:
    """What is done, and why, for people."""

    do: FailoverAction
    why: str = ""
    """Empty: all is well."""


def decide(case: Case, *, patience: Seconds) -> FailoverDecision:
    """`patience`: the silence after which a host is given up; nobody is, sooner than heartbeats
    that were lost are told from a dead host."""
    ours, theirs = case.ours, case.theirs
    if theirs.outcome == ProtectionOutcome.FAILED_OVER:
        if ours.runs:
            return _wait(f"{case.primary} and {case.backup} both say that it runs there")
        return FailoverDecision(do=FailoverAction.FAIL_OVER, why=f"it runs on {case.backup}")
    if ours.wants_leave:
        said = str(ours.says or "").partition(": ")[2]
        return FailoverDecision(
            do=FailoverAction.GRANT_SOLO, why=f"it goes on without {case.backup}: {said}"
        )
    if case.alone:
        if ours.phase == READY and theirs.connected:
            return FailoverDecision(
                do=FailoverAction.STANDBY_RESTORED,
                why=f"its standby on {case.backup} is whole again",
            )
        return _wait(f"it may have gone on without {case.backup}: only a person fails it over")
    return _by_silence(case, patience) if case.gone or case.silent else _wait()


def _by_silence(case: Case, patience: Seconds) -> FailoverDecision:
    theirs = case.theirs
    if not theirs.ready or theirs.runs is False:
        says = theirs.error or theirs.says or "it says nothing"
        return _wait(f"its standby on {case.backup} is not ready: {says}")
    if case.gone:
        return FailoverDecision(
            do=FailoverAction.FAIL_OVER, why=f"it does not run on {case.primary} any more"
        )
    silent = Seconds(float(theirs.silent_for or 0.0))
    if silent < max(patience, LIVES):
        return _wait(f"{case.primary} is silent")
    return FailoverDecision(
        do=FailoverAction.FAIL_OVER,
        why=f"nothing answers on {case.primary}, and {case.backup} has not heard of it for"
        f" {silent:.0f} s",
    )  # fmt: skip


def _wait(why: str = "") -> FailoverDecision:
    return FailoverDecision(do=FailoverAction.WAIT, why=why)
