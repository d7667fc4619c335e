"""Summarise a protection from both agents' answers, and decide which changes are reported. Pure."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.request import Judge
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds

SUMMARY_EVERY = Seconds(10.0)
_A_LOT = 0.25
"""A change of the interval by this share is reported immediately."""
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
UNKNOWN = "unknown"
_YEAR_9999 = 253_370_764_800
_JUDGES: Mapping[str, str] = {
    Judge.LEASE: "automatic, by the lease", Judge.WATCH: "automatic, by vmckpt run",
    Judge.PERSON: "manual",
}  # fmt: skip


class Because(StrEnum):
    """Why a line is reported."""

    FIRST = "first"
    PHASE = "phase"
    STANDBY = "standby"
    IN_THE_WAY = "in the way"
    INTERVAL = "interval"
    LOST = "packets lost"
    END = "end"
    TIME = "time"
    """Nothing has changed for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a protection at one instant."""

    phase: str
    """"failed-over", else the phase that the primary reports, else its outcome, else "unknown"."""
    ready: bool
    """Whether the standby can take over."""
    ready_why: str
    in_the_way: str | None
    epoch: int | None
    behind_s: float | None
    """What would be lost if the host died now (RPO), in seconds; None if unknown or unprotected."""
    pause_s: float | None
    """Median of the guest's pauses, in seconds."""
    interval_s: float | None
    interval_why: str | None
    output_delay_s: float | None
    packets_lost: int
    end: str | None
    """What happened, if the guest failed over, shut down, panicked or was stopped; else None."""
    next_step: str | None = None
    """What the operator must do now; None: nothing."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_status(entry: Mapping[str, Any]) -> Look:
    """Build a Look from an entry that `app.protection.status` returned."""
    ours, theirs = _said(entry, "primary"), _said(entry, "backup")
    ready, why = readiness(ours, theirs)
    median: Mapping[str, Any] = ours.told.get("median") or {}
    alone = ours.phase == "alone"
    over = has_taken_over(theirs)
    return Look(
        phase=theirs.outcome if over and theirs.outcome
        else str(ours.phase or ours.outcome or UNKNOWN),
        # After a failover, the former primary's problems no longer matter.
        ready=ready, ready_why=why, in_the_way=None if over else _in_the_way(ours),
        epoch=ours.told.get("epoch"),
        # The standby is outdated, so no RPO applies.
        behind_s=None if alone else ours.told.get("rpo_s"),
        pause_s=median.get("pause_s"), interval_s=ours.told.get("interval_s"),
        interval_why=ours.told.get("interval_why"), output_delay_s=ours.told.get("output_delay_s"),
        packets_lost=int(ours.told.get("packets_lost") or 0), end=_end(entry, ours, theirs),
        next_step=_next_step(entry, ours, theirs),
    )  # fmt: skip


_ANEW = "run vmckpt unprotect GUEST, then vmckpt protect GUEST --to HOST"


def _said(entry: Mapping[str, Any], role: str) -> ProtectionStatus:
    return parse_answer(entry["says"].get(entry[role]) or {})


def readiness(ours: ProtectionStatus, theirs: ProtectionStatus) -> tuple[bool, str]:
    """Return whether the standby can take over, and why or why not."""
    if has_taken_over(theirs):
        gone = theirs.runs is False
        return False, "the guest was failed over to it" if gone else "the guest is running there"
    if ours.phase == "alone":
        return False, "the guest is running unprotected, so its standby is outdated"
    if theirs.error is not None:
        peer: Mapping[str, Any] = ours.told.get("standby") or {}
        follows = ours.phase == "protecting" and bool(peer.get("ready"))
        return follows, f"its host cannot be queried: {theirs.error}"
    if not theirs.told:
        return False, f"its host has no record of it; {_ANEW}"
    if theirs.runs is False:
        return False, f"its QEMU is gone; {_ANEW}"
    return theirs.ready, str(theirs.says or "no reason reported")


def has_taken_over(theirs: ProtectionStatus) -> bool:
    """Return whether the backup reports that it has taken over the guest."""
    return bool(theirs.outcome == ProtectionOutcome.FAILED_OVER)


def decided_by(entry: Mapping[str, Any]) -> str:
    """Return what decides that the guest's host is dead, for display."""
    return _JUDGES.get(
        entry.get("judge") or "", "automatic" if entry.get("automatic") else "manual"
    )


def _in_the_way(ours: ProtectionStatus) -> str | None:
    told = ours.says or ours.error
    if told is None and ours.outcome:
        told = ours.why
    return None if told is None else str(told)


def _end(entry: Mapping[str, Any], ours: ProtectionStatus, theirs: ProtectionStatus) -> str | None:
    if has_taken_over(theirs):
        over, backup = f"failed over{_time(theirs)}", entry["backup"]
        if theirs.runs is False:
            return f"{over}; the guest is no longer running on {backup}: {theirs.why}"
        return f"{over}; the guest is running on {backup}, unprotected: {theirs.why}"
    if ours.outcome == ProtectionOutcome.ENDED:
        return str(ours.why)
    return None


def _time(theirs: ProtectionStatus) -> str:
    """Return " at" and the local time of a failover; "" if the backup did not report the time."""
    at = theirs.told.get("at")
    if at is None or not 0 < at < _YEAR_9999:
        return ""
    return f" at {datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def _next_step(
    entry: Mapping[str, Any], ours: ProtectionStatus, theirs: ProtectionStatus
) -> str | None:
    guest, primary = entry["guest"], entry["primary"]
    if has_taken_over(theirs):
        if ours.runs and ours.role != "backup":  # recover decides between two copies
            return "run vmckpt recover"
        if ours.error is None:
            return f"run vmckpt recover, then vmckpt protect {guest} --reverse"
        return (
            f"run vmckpt recover; once {primary} is up again, run vmckpt protect {guest} --reverse"
        )
    if ours.outcome == ProtectionOutcome.ENDED:
        return "run vmckpt recover"
    if ours.outcome == ProtectionOutcome.DIED and theirs.ready and not entry.get("automatic"):
        return f"run vmckpt failover {guest}"
    return None


def is_notable(last: Look | None, passed: Seconds, now: Look) -> tuple[Because, ...]:
    """Return the reasons to report a line now; empty if there are no reasons.

    `last`: the last reported state, from `passed` seconds ago; None if no state was reported yet.
    """
    if last is None:
        return (Because.FIRST,)
    found = [
        because
        for because, changed in (
            (Because.END, now.end is not None),
            (Because.PHASE, now.phase != last.phase),
            (Because.STANDBY, now.ready != last.ready or _other(now.ready_why, last.ready_why)),
            (Because.IN_THE_WAY, _other(now.in_the_way, last.in_the_way)),
            (Because.INTERVAL, _much(now.interval_s, last.interval_s)),
            (Because.LOST, now.packets_lost != last.packets_lost),
        )
        if changed
    ]
    if not found and passed >= SUMMARY_EVERY:
        found.append(Because.TIME)
    return tuple(found)


def _other(now: str | None, last: str | None) -> bool:
    """Return whether two texts differ in more than their numbers."""
    return _NUMBERS.sub("", now or "") != _NUMBERS.sub("", last or "")


def _much(now: float | None, last: float | None) -> bool:
    if now is None or last is None:
        return now is not last
    return abs(now - last) >= _A_LOT * last
