"""vmckpt watch, of a protection: no controller writes down how it goes, so its agents are asked."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.cli.watch import nobody
from vmckpt.journal.jobs import Follower
from vmckpt.journal.records import Operation
from vmckpt.protection import status
from vmckpt.protection.status import Because, Look
from vmckpt.units import Seconds, show_seconds

_ASK_EVERY = Seconds(1.0)

Ask = Callable[[Operation], Mapping[str, Any]]
"""How it stands by what its agents say; see app.protection.job_status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is told of it."""

    at: float
    """Seconds since it began."""
    because: tuple[Because, ...]
    look: Look

    def as_json(self) -> dict[str, Any]:
        return {"kind": "stands", "at": self.at, "because": self.because, **self.look.as_json()}


def follow(
    follower: Follower, ask: Ask, take: Callable[[Told], None], say: Callable[[str], None]
) -> str:
    """Ask its agents until it has ended; why it has. `say` is told who is at work with it.

    Raises OrphanedJobs if whoever was died.
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
            # Its agents are taken away, or moved: what they say meanwhile is half of it.
            if not said:
                said = True
                controller = operation.controller
                say(f"process {controller.pid} on {controller.host} is at work with it")
        else:
            said, now = False, status.parse_status(ask(operation))
            because = status.is_notable(last, Seconds(time.monotonic() - told_at), now)
            if because:
                last, told_at = now, time.monotonic()
                take(Told(at=time.time() - operation.began_at, because=because, look=now))
            if now.end is not None:
                return now.end
        # Each look starts an agent on both hosts; a busy host has at least half of its time for its
        # guests.
        time.sleep(max(_ASK_EVERY, time.monotonic() - began))


def _in_hands(operation: Operation) -> bool:
    """Whether a controller is at work with one that agents had gone on with."""
    return operation.phase == "protecting" and not operation.controller.entrusted


def ended(operation: Operation) -> str:
    """How one ended that the journal knows the end of."""
    report = operation.report or {}
    if report.get("failed_over"):
        return f"the guest runs on {report['failed_over']}: {report.get('why')}"
    if report.get("unprotected"):
        return f"it is not protected any more; the guest runs on {report.get('runs_on')}"
    return str(report.get("error") or operation.outcome)


def line(look: Look) -> str:
    """How it stands, in a line."""
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
        parts.append(f"{look.packets_lost} packets lost")
    ready = "ready" if look.ready else "not ready"
    parts.append(f"standby {ready}: {look.ready_why}")
    if look.in_the_way is not None:
        parts.append(f"in the way: {look.in_the_way}")
    return ", ".join(parts)


def word(entry: Mapping[str, Any]) -> str:
    """One protection's status in at most three words, for a list of jobs.

    `entry` is what `app.protection.protection_summaries` returns for one.
    """
    seen = status.parse_status(entry)
    if seen.end is not None:
        return "ended"
    if "error" in (entry["says"].get(entry["primary"]) or {}):
        return f"{entry['primary']} silent"
    if seen.phase == "protecting" and seen.behind_s is not None:
        return f"{show_seconds(seen.behind_s)} behind"
    return seen.phase
