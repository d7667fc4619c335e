"""vmckpt watch for a protection. The agents report the status, as no controller records it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.cli.watch import nobody
from vmckpt.journal.jobs import Follower
from vmckpt.journal.records import Operation
from vmckpt.protection import status
from vmckpt.protection.status import Because, Look
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.units import Seconds, show_count, show_seconds

_ASK_EVERY = Seconds(1.0)

Ask = Callable[[Operation], Mapping[str, Any]]
"""Returns the status that the agents of a protection report; see app.protection.job_status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A status of a protection, and why it is reported."""

    at: float
    """Seconds since the protection began."""
    because: tuple[Because, ...]
    look: Look

    def as_json(self) -> dict[str, Any]:
        return {"kind": "stands", "at": self.at, "because": self.because, **self.look.as_json()}


def follow(
    follower: Follower, ask: Ask, take: Callable[[Told], None], say: Callable[[str], None]
) -> str:
    """Follow a protection until it ends. Returns why it ended.

    `take` receives each notable status. `say` receives a line when a controller is changing the
    protection. Raises OrphanedJobs if this controller dies.
    """
    last: Look | None = None
    told_at, said = 0.0, False
    while True:
        began = time.monotonic()
        view = follower.look().view
        operation = view.operation
        if not operation.active:
            return ended(operation)
        if view.unattended:
            raise nobody(view)
        if _in_hands(operation):
            # The agents are being removed or replaced, so their status is incomplete.
            if not said:
                said = True
                controller = operation.controller
                say(f"process {controller.pid} on {controller.host} is changing the protection")
        else:
            said, now = False, status.parse_status(ask(operation))
            because = status.is_notable(last, Seconds(time.monotonic() - told_at), now)
            if because:
                last, told_at = now, time.monotonic()
                take(Told(at=time.time() - operation.began_at, because=because, look=now))
            if now.end is not None:
                return now.end if now.next_step is None else f"{now.end}; next: {now.next_step}"
        # Each query starts an agent on both hosts. The pause leaves a busy host at least half of
        # its time for guests.
        time.sleep(max(_ASK_EVERY, time.monotonic() - began))


def _in_hands(operation: Operation) -> bool:
    """Return whether a controller is changing a protection that was delegated to the agents."""
    return operation.phase == "protecting" and not operation.controller.entrusted


def ended(operation: Operation) -> str:
    """Return how a protection ended, from its report in the journal."""
    report = operation.report or {}
    if report.get("failed_over"):
        why = f": {report['why']}" if report.get("why") else ""  # recover may not know it
        return f"the guest is running on {report['failed_over']}{why}"
    if report.get("unprotected"):
        return f"the protection was ended; the guest is running on {report.get('runs_on')}"
    return str(report.get("error") or operation.outcome)


def line(look: Look) -> str:
    """Return a status as one line."""
    if look.end is not None:
        return f"{look.phase}: {look.end}"
    parts = [look.phase]
    if look.epoch is not None:
        parts.append(f"epoch {look.epoch}")
    if look.behind_s is not None:
        parts.append(f"{show_seconds(look.behind_s)} behind")
    if look.pause_s is not None:
        parts.append(f"pause {show_seconds(look.pause_s)}")
    if look.interval_s is not None:
        parts.append(f"interval {show_seconds(look.interval_s)} ({look.interval_why})")
    if look.output_delay_s is not None:
        parts.append(f"output waits {show_seconds(look.output_delay_s)}")
    if look.packets_lost:
        parts.append(f"{show_count(look.packets_lost, 'packet')} lost")
    ready = "ready" if look.ready else "not ready"
    parts.append(f"standby {ready}: {look.ready_why}")
    if look.in_the_way is not None:
        parts.append(f"problem: {look.in_the_way}")
    return ", ".join(parts)


def word(entry: Mapping[str, Any]) -> str:
    """Return a protection's status in a few words, for the list of jobs.

    `entry`: the value that `app.protection.protection_summaries` returns for the protection.
    """
    seen = status.parse_status(entry)
    if seen.end is not None:
        return "failed over" if seen.phase == ProtectionOutcome.FAILED_OVER else "ended"
    if "error" in (entry["says"].get(entry["primary"]) or {}):
        return f"{entry['primary']} silent"
    if seen.phase == "protecting" and seen.behind_s is not None:
        return f"{show_seconds(seen.behind_s)} behind"
    return seen.phase
