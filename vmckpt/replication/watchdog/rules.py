"""Decide what a watchdog does next, from what it sees. Pure.

The lease comes first: no problem of the agent delays the end of a guest whose lease has ended. All
times are in seconds of CLOCK_BOOTTIME.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from vmckpt.units import Seconds

TURN = Seconds(0.05)
"""The watchdog looks at least this often."""
_STUCK = Seconds(1.0)
"""A watchdog that has not looked for this long hangs: it is locked in memory and runs before
ordinary processes."""


class KillMethod(StrEnum):
    """What ends a guest whose lease has ended; the values are for users to read."""

    KERNEL = "the kernel and a watchdog"
    UNIT = "a watchdog in a systemd unit of its own"
    PAIR = "two watchdogs that restart each other"


def kill_method(*, timer: bool, systemd: bool) -> KillMethod:
    """Choose what enforces a lease on a host.

    `timer`: the kernel's timer can be set in QEMU, which needs ptrace(2). Without it a watchdog
    must outlive whatever kills the agent: systemd restarts it, or a second watchdog does.
    """
    if timer:
        return KillMethod.KERNEL
    return KillMethod.UNIT if systemd else KillMethod.PAIR


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient the watchdog is with the agent."""

    patience: Seconds = Seconds(1.0)
    """The guest may be paused this long for an epoch."""
    grace: Seconds = Seconds(5.0)
    """An agent that has begun to work may take this long to resume a guest that it found paused."""
    starts: Seconds = Seconds(60.0)
    """An agent may take this long from its start to its first beat: where processors are busy,
    starting Python alone takes seconds, and another agent would be no faster."""
    silence: Seconds = Seconds(2.0)
    """An agent that has counted its heartbeats up once does so at least this often."""
    again: Seconds = Seconds(1.0)
    """The agent is started, and the guest is resumed, at most this often."""
    leaves: Seconds = Seconds(60.0)
    """The agent of a guest that has ended may take this long to clean up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogFacts:
    """What the watchdog sees."""

    guest_lives: bool
    """QEMU's process exists."""
    over: bool
    """The protection has ended."""
    gone: float
    """Since when QEMU is gone; 0: it is not."""
    renewed: float
    """When the last successful renewal was sent; 0: no lease is enforced."""
    lasts: float
    """How long a renewal is valid."""
    stopped: float
    """Since when the guest has been paused for an epoch; 0: it is not."""
    agent_lives: bool
    agent_since: float
    """Since when this agent has existed."""
    came: float
    """Since when the agent has been working; 0: it is still starting."""
    spoke: float
    """When the agent's heartbeats last changed; 0: they never did."""
    started: float | None
    """When the watchdog last started an agent; None: never."""
    woke: float
    """When the watchdog last continued after a gap in which neither it nor the agent could run."""
    resumable: bool
    """The watchdog can resume the guest itself."""
    resuming: bool
    """A process of the watchdog is resuming the guest."""
    resumed: float | None
    """When the last attempt to resume the guest began; None: never."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until`, when the watchdog must look again at the latest."""

    until: float


@dataclass(frozen=True, slots=True)
class KillGuest:
    """The lease has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class KillAgent:
    """The agent hangs."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgent:
    """The agent is gone, and there is work for it."""


@dataclass(frozen=True, slots=True)
class ResumeGuest:
    """No agent is working, and the last one left the guest paused."""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing is left to guard."""

    why: str


Action: TypeAlias = Wait | KillGuest | KillAgent | StartAgent | ResumeGuest | End


def decide(seen: WatchdogFacts, now: float, rules: Rules) -> Action:
    """Choose the next action; the first rule that matches wins."""
    if seen.over:
        return End("the protection has ended")
    if not seen.guest_lives:
        return _afterwards(seen, now, rules)
    if _has_ended(seen.renewed, seen.lasts, now):
        return KillGuest(_ended(seen.renewed, seen.lasts, now))
    if not seen.agent_lives:
        return _without_agent(seen, now, rules)
    if (why := _hangs(seen, now, rules)) is not None:
        return KillAgent(why)
    # A working agent resumes the guest itself; an agent that is starting may take long.
    if seen.came == 0 and _may_resume(seen, now, rules):
        return ResumeGuest()
    return _wait(seen.renewed, seen.lasts, now)


def _without_agent(seen: WatchdogFacts, now: float, rules: Rules) -> Action:
    """Resume the guest first: that needs no new process, and its output stays buffered."""
    first = seen.resumed is None or seen.resumed < seen.stopped
    if first and seen.stopped != 0 and seen.resumable and not seen.resuming:
        return ResumeGuest()
    if not seen.resuming and _may_start(seen, now, rules):
        return StartAgent()
    if _may_resume(seen, now, rules):
        return ResumeGuest()
    return _wait(seen.renewed, seen.lasts, now)


def _may_resume(seen: WatchdogFacts, now: float, rules: Rules) -> bool:
    paused = seen.stopped != 0 and seen.resumable and not seen.resuming
    return paused and (seen.resumed is None or now >= seen.resumed + rules.again)


def _may_start(seen: WatchdogFacts, now: float, rules: Rules) -> bool:
    return seen.started is None or now >= seen.started + rules.again


def _afterwards(seen: WatchdogFacts, now: float, rules: Rules) -> Action:
    """Start the agent of a guest that has ended: the standby takes over only after its report."""
    if now > seen.gone + rules.leaves:
        return End("the guest's QEMU has ended, and its agent does not end the protection")
    if not seen.agent_lives and _may_start(seen, now, rules):
        return StartAgent()
    return Wait(now + TURN)


def _wait(renewed: float, lasts: float, now: float) -> Wait:
    soon = now + TURN
    return Wait(soon if renewed == 0 else min(soon, renewed + lasts))


def _has_ended(renewed: float, lasts: float, now: float) -> bool:
    """Return whether the lease has ended; NaN counts as an end."""
    return renewed != 0 and not now <= renewed + lasts


def _ended(renewed: float, lasts: float, now: float) -> str:
    if renewed < 0:
        return "the lease is lost: the lease store reports another holder"
    return (
        "the lease has ended: its last confirmed renewal was sent"
        f" {now - renewed:.2f} s ago and was valid for {lasts:.2f} s"
    )


def _hangs(seen: WatchdogFacts, now: float, rules: Rules) -> str | None:
    """Return why the agent must be killed; None: it need not be."""
    if seen.came == 0:
        late = now > max(seen.agent_since, seen.woke) + rules.starts
        return f"it is not ready after {now - seen.agent_since:.0f} s" if late else None
    if seen.stopped != 0:
        # A pause that an earlier agent left may take longer than one of its own.
        inherited = seen.stopped < seen.came
        since = seen.came + rules.grace if inherited else seen.stopped + rules.patience
        if now > max(since, seen.woke + rules.patience):
            return f"the guest has been paused for {now - seen.stopped:.2f} s"
    if seen.spoke != 0:
        # Heartbeats of an earlier agent do not count as this agent's.
        own = seen.spoke >= seen.came
        since = seen.spoke + rules.silence if own else seen.came + rules.starts
        if now > max(since, seen.woke + rules.silence):
            return f"it has sent no heartbeat for {now - seen.spoke:.2f} s"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareSeen:
    """What the spare watchdog of a pair sees."""

    guest_lives: bool
    over: bool
    renewed: float
    lasts: float
    partner_lives: bool
    looked: float
    """When the watchdog that acts last looked."""
    woke: float
    """As in `WatchdogFacts`."""


@dataclass(frozen=True, slots=True)
class KillPartner:
    """The watchdog that acts hangs."""

    why: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The watchdog that acts is gone: the spare acts from now on."""


def stand_by(seen: SpareSeen, now: float) -> Wait | KillGuest | KillPartner | TakeOver | End:
    """Choose what the spare watchdog does.

    It kills the guest as well, since doing that twice does no harm, and leaves all else to the
    watchdog that acts, for as long as that one lives.
    """
    if seen.over:
        return End("the protection has ended")
    if seen.guest_lives and _has_ended(seen.renewed, seen.lasts, now):
        return KillGuest(_ended(seen.renewed, seen.lasts, now))
    if not seen.partner_lives:
        return TakeOver()
    if stuck(seen.looked, seen.woke, now):
        return KillPartner(f"it has not looked for {now - seen.looked:.2f} s")
    return _wait(seen.renewed if seen.guest_lives else 0.0, seen.lasts, now)


def stuck(looked: float, woke: float, now: float) -> bool:
    """Return whether a watchdog that last looked at `looked` hangs."""
    return now > max(looked, woke) + _STUCK
