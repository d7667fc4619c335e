"""What a watchdog does next, from what it sees. Pure.

The lease comes first: nothing that is wrong with the agent delays the end of a guest whose lease
has ended. All times are CLOCK_BOOTTIME in seconds.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from vmckpt.units import Seconds

TURN = Seconds(0.05)
"""It looks at least this often."""
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
    """How patient it is with the agent."""

    patience: Seconds = Seconds(1.0)
    """The guest may be paused this long for an epoch."""
    grace: Seconds = Seconds(5.0)
    """An agent that has come to work may take this long to resume a guest that it found paused."""
    starts: Seconds = Seconds(60.0)
    """An agent may take this long from its start to its first beat: where processors are busy,
    starting Python alone takes seconds, and another agent would be no faster."""
    silence: Seconds = Seconds(2.0)
    """An agent that has ever counted its beats up does so at least this often."""
    again: Seconds = Seconds(1.0)
    """It is started, and the guest is resumed, at most this often."""
    leaves: Seconds = Seconds(60.0)
    """The agent of a guest that has ended may take so long to see to what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogFacts:
    """How things stand."""

    guest_lives: bool
    """QEMU's process is there."""
    over: bool
    """The protection has ended."""
    gone: float
    """Since when QEMU is not there; 0: it is."""
    renewed: float
    """When the last renewal that succeeded was sent; 0: no lease is enforced."""
    lasts: float
    """How long that is good."""
    stopped: float
    """Since when the guest is paused for an epoch; 0: it is not."""
    agent_lives: bool
    agent_since: float
    """Since when there is this agent."""
    came: float
    """Since when it is at work; 0: it is still starting."""
    spoke: float
    """When its beats last changed; 0: they never did."""
    started: float | None
    """When the watchdog last started one; None: never."""
    woke: float
    """When it could look again after a while in which it could not: the agent was frozen, too."""
    resumable: bool
    """The watchdog can resume the guest itself."""
    resuming: bool
    """A process of the watchdog's is at it."""
    resumed: float | None
    """When that was last begun; None: never."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again then at the latest."""

    until: float


@dataclass(frozen=True, slots=True)
class KillGuest:
    """The lease has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class KillAgent:
    """It hangs."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgent:
    """It is gone, and there is something for it to do."""


@dataclass(frozen=True, slots=True)
class ResumeGuest:
    """No agent is at work, and the last one left the guest paused."""


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
    # One that is at work does it itself; one that starts may take long.
    if seen.came == 0 and _may_resume(seen, now, rules):
        return ResumeGuest()
    return _wait(seen.renewed, seen.lasts, now)


def _without_agent(seen: WatchdogFacts, now: float, rules: Rules) -> Action:
    """The guest first: to resume it nothing need be started, and its output stays buffered."""
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
    """An agent must leave word of how the guest ended, or its standby does not take over."""
    if now > seen.gone + rules.leaves:
        return End("the guest's QEMU has ended, and its agent leaves no word")
    if not seen.agent_lives and _may_start(seen, now, rules):
        return StartAgent()
    return Wait(now + TURN)


def _wait(renewed: float, lasts: float, now: float) -> Wait:
    soon = now + TURN
    return Wait(soon if renewed == 0 else min(soon, renewed + lasts))


def _has_ended(renewed: float, lasts: float, now: float) -> bool:
    """Written so that what is no number counts as an end."""
    return renewed != 0 and not now <= renewed + lasts


def _ended(renewed: float, lasts: float, now: float) -> str:
    if renewed < 0:
        return "the lease is lost: the witness says that another holds it"
    return (
        "the lease has ended: its last renewal that was answered was sent"
        f" {now - renewed:.2f} s ago and was good for {lasts:.2f} s"
    )


def _hangs(seen: WatchdogFacts, now: float, rules: Rules) -> str | None:
    """Why the agent is to be ended; None: it is not."""
    if seen.came == 0:
        late = now > max(seen.agent_since, seen.woke) + rules.starts
        return f"it has not come to work for {now - seen.agent_since:.0f} s" if late else None
    if seen.stopped != 0:
        # A pause that another left behind it ends later than one of its own.
        inherited = seen.stopped < seen.came
        since = seen.came + rules.grace if inherited else seen.stopped + rules.patience
        if now > max(since, seen.woke + rules.patience):
            return f"the guest has been paused for {now - seen.stopped:.2f} s"
    if seen.spoke != 0:
        # The beats of an agent before it are not its own.
        own = seen.spoke >= seen.came
        since = seen.spoke + rules.silence if own else seen.came + rules.starts
        if now > max(since, seen.woke + rules.silence):
            return f"it has said nothing for {now - seen.spoke:.2f} s"
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
    """When the one that acts last looked."""
    woke: float
    """As in `WatchdogFacts`."""


@dataclass(frozen=True, slots=True)
class KillPartner:
    """The watchdog that acts hangs."""

    why: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    """It is gone: the spare one acts from now on."""


def stand_by(seen: SpareSeen, now: float) -> Wait | KillGuest | KillPartner | TakeOver | End:
    """Choose what the spare watchdog does: to end the guest twice is the same as once, and all
    else is left to the one that acts, for as long as it does."""
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
    """Whether a watchdog hangs that last looked then."""
    return now > max(looked, woke) + _STUCK
