"""Decide what a watchdog does next, from the facts that it has gathered. Pure.

The lease comes first: no problem with the agent delays killing a guest whose lease has ended. All
times are in seconds of CLOCK_BOOTTIME.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from vmckpt.units import Seconds

TURN = Seconds(0.05)
"""The watchdog runs a cycle at least this often."""
_STUCK = Seconds(1.0)
"""A watchdog that has not run a cycle for this long is hung: it is locked in memory and has
real-time priority.
"""


class KillMethod(StrEnum):
    """What kills a guest whose lease has ended. The values are shown to users."""

    KERNEL = "the kernel and a watchdog"
    UNIT = "a watchdog in a systemd unit of its own"
    PAIR = "two watchdogs that restart each other"


def kill_method(*, timer: bool, systemd: bool) -> KillMethod:
    """Choose the method that enforces a lease on a host.

    `timer`: the kernel's timer can be set in QEMU, which needs ptrace(2). Without the timer, the
    watchdog must survive whatever kills the agent: systemd or a second watchdog restarts it.
    """
    if timer:
        return KillMethod.KERNEL
    return KillMethod.UNIT if systemd else KillMethod.PAIR


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The time limits that the watchdog applies to the agent."""

    patience: Seconds = Seconds(1.0)
    """The guest may be paused this long for an epoch."""
    grace: Seconds = Seconds(5.0)
    """An agent that finds the guest paused may take this long to resume it."""
    starts: Seconds = Seconds(60.0)
    """An agent may take this long from its start to its first heartbeat: on a busy host, starting
    Python alone takes seconds, and another agent would be no faster."""
    silence: Seconds = Seconds(2.0)
    """After its first heartbeat, an agent must send a heartbeat at least this often."""
    again: Seconds = Seconds(1.0)
    """The agent is started, and the guest is resumed, at most this often."""
    leaves: Seconds = Seconds(60.0)
    """Once QEMU is gone, the agent may take this long to clean up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogFacts:
    """The facts that the watchdog gathers in a cycle."""

    guest_lives: bool
    """QEMU's process exists."""
    over: bool
    """The protection has ended."""
    gone: float
    """When QEMU was first found gone; 0: it exists."""
    renewed: float
    """When the last successful renewal was sent.

    0: no lease is enforced; negative: the lease is lost.
    """
    lasts: float
    """How long a renewal is valid."""
    stopped: float
    """When the guest was paused for an epoch; 0: it is not paused for an epoch."""
    agent_lives: bool
    agent_since: float
    """When this agent was first seen."""
    came: float
    """When the agent started to work; 0: it is still starting."""
    spoke: float
    """When the agent's heartbeats last changed; 0: they never did."""
    started: float | None
    """When the watchdog last started an agent; None: never."""
    woke: float
    """End of the last gap in which neither the watchdog nor the agent could run."""
    resumable: bool
    """The watchdog can resume the guest itself."""
    resuming: bool
    """A process of the watchdog is resuming the guest."""
    resumed: float | None
    """When the last attempt to resume the guest began; None: never."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing now; the next cycle is due at `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class KillGuest:
    """Kill the guest: its lease has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class KillAgent:
    """Kill the agent: it is hung."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start the agent: it is gone, and there is work for it."""


@dataclass(frozen=True, slots=True)
class ResumeGuest:
    """Resume the guest: no agent is working, and the last agent left the guest paused."""


@dataclass(frozen=True, slots=True)
class End:
    """Exit: nothing is left to guard."""

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
    # A working agent resumes the guest itself; an agent that is starting may take too long.
    if seen.came == 0 and _may_resume(seen, now, rules):
        return ResumeGuest()
    return _wait(seen.renewed, seen.lasts, now)


def _without_agent(seen: WatchdogFacts, now: float, rules: Rules) -> Action:
    """Choose the action while no agent is working.

    Resuming the guest comes first: it needs no agent, and the guest's output stays buffered.
    """
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
    """Choose the action once QEMU is gone.

    The agent is started to report the outcome, let the standby take over at once, and clean up.
    """
    if now > seen.gone + rules.leaves:
        return End("the guest's QEMU is gone, and vmckpt's agent has not ended the protection")
    if not seen.agent_lives and _may_start(seen, now, rules):
        return StartAgent()
    return Wait(now + TURN)


def _wait(renewed: float, lasts: float, now: float) -> Wait:
    soon = now + TURN
    return Wait(soon if renewed == 0 else min(soon, renewed + lasts))


def _has_ended(renewed: float, lasts: float, now: float) -> bool:
    """Return whether a lease that is valid for `lasts` seconds after `renewed` has ended.

    `renewed` is 0 if no lease is enforced. NaN counts as ended.
    """
    return renewed != 0 and not now <= renewed + lasts


def _ended(renewed: float, lasts: float, now: float) -> str:
    if renewed < 0:
        return "the lease is lost: the lease store does not grant it to this host"
    return (
        "the lease has ended: its last confirmed renewal was sent"
        f" {now - renewed:.2f} s ago and was valid for {lasts:.2f} s"
    )


def _hangs(seen: WatchdogFacts, now: float, rules: Rules) -> str | None:
    """Return why the agent must be killed; None if it is working or still starting."""
    if seen.came == 0:
        late = now > max(seen.agent_since, seen.woke) + rules.starts
        return f"it is not ready after {now - seen.agent_since:.0f} s" if late else None
    if seen.stopped != 0:
        # The limit is longer if an earlier agent left the guest paused.
        inherited = seen.stopped < seen.came
        since = seen.came + rules.grace if inherited else seen.stopped + rules.patience
        if now > max(since, seen.woke + rules.patience):
            return f"the guest has been paused for {now - seen.stopped:.2f} s"
    if seen.spoke != 0:
        # Heartbeats of an earlier agent do not count.
        own = seen.spoke >= seen.came
        since = seen.spoke + rules.silence if own else seen.came + rules.starts
        if now > max(since, seen.woke + rules.silence):
            return f"it has sent no heartbeat for {now - seen.spoke:.2f} s"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareSeen:
    """The facts that the spare watchdog of a pair gathers."""

    guest_lives: bool
    over: bool
    renewed: float
    lasts: float
    partner_lives: bool
    looked: float
    """When the active watchdog last ran a cycle."""
    woke: float
    """End of the last gap in which the spare could not run."""


@dataclass(frozen=True, slots=True)
class KillPartner:
    """Kill the active watchdog: it is hung."""

    why: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Become the active watchdog: the active watchdog is gone."""


def stand_by(seen: SpareSeen, now: float) -> Wait | KillGuest | KillPartner | TakeOver | End:
    """Choose what the spare watchdog does.

    The spare also kills the guest, since killing it twice does no harm. Everything else is left to
    the active watchdog for as long as that process lives.
    """
    if seen.over:
        return End("the protection has ended")
    if seen.guest_lives and _has_ended(seen.renewed, seen.lasts, now):
        return KillGuest(_ended(seen.renewed, seen.lasts, now))
    if not seen.partner_lives:
        return TakeOver()
    if stuck(seen.looked, seen.woke, now):
        return KillPartner(f"it has not run for {now - seen.looked:.2f} s")
    return _wait(seen.renewed if seen.guest_lives else 0.0, seen.lasts, now)


def stuck(looked: float, woke: float, now: float) -> bool:
    """Return whether a watchdog whose last cycle was at `looked` is hung."""
    return now > max(looked, woke) + _STUCK
