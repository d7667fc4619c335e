"""What a guard does next, from what it sees. Pure.

The lease comes first: nothing that is wrong with the agent delays the end of a guest whose lease
has ended. All times are CLOCK_BOOTTIME in seconds.
"""

from dataclasses import dataclass
from typing import TypeAlias

from vmckpt.units import Seconds

TURN = Seconds(0.05)
"""It looks at least this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient it is with the agent."""

    patience: Seconds = Seconds(1.0)
    """The guest may stand still this long for an epoch."""
    grace: Seconds = Seconds(5.0)
    """An agent that was started anew may take this long to undo what it found."""
    silence: Seconds = Seconds(2.0)
    """An agent that has ever counted its beats up does so at least this often."""
    again: Seconds = Seconds(1.0)
    """It is started at most this often."""
    leaves: Seconds = Seconds(60.0)
    """The agent of a guest that has ended may take so long to see to what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
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
    """Since when the guest stands still for an epoch; 0: it does not."""
    agent_lives: bool
    agent_since: float
    """Since when there is this agent."""
    spoke: float
    """When its beats last changed; 0: they never did."""
    started: float | None
    """When the guard last started one; None: never."""
    woke: float
    """When it could look again after a while in which it could not: the agent was frozen, too."""


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
class End:
    """Nothing is left to guard."""

    why: str


Action: TypeAlias = Wait | KillGuest | KillAgent | StartAgent | End


def decide(seen: Seen, now: float, rules: Rules) -> Action:
    """Choose the next action; the first rule that matches wins."""
    if seen.over:
        return End("the protection has ended")
    if not seen.guest_lives:
        return _afterwards(seen, now, rules)
    ends = seen.renewed + seen.lasts
    # Written so that what is no number counts as an end.
    if seen.renewed != 0 and not now <= ends:
        return KillGuest(_ended(seen, now))
    if seen.agent_lives:
        why = _hangs(seen, now, rules)
        return KillAgent(why) if why else _wait(seen, now)
    if seen.started is None or now >= seen.started + rules.again:
        return StartAgent()
    return _wait(seen, now)


def _afterwards(seen: Seen, now: float, rules: Rules) -> Action:
    """Somebody must leave word of how the guest ended, or nobody goes on from its standby."""
    if now > seen.gone + rules.leaves:
        return End("the guest's QEMU has ended, and its agent leaves no word")
    if not seen.agent_lives and (seen.started is None or now >= seen.started + rules.again):
        return StartAgent()
    return Wait(now + TURN)


def _wait(seen: Seen, now: float) -> Wait:
    soon = now + TURN
    return Wait(soon if seen.renewed == 0 else min(soon, seen.renewed + seen.lasts))


def _ended(seen: Seen, now: float) -> str:
    if seen.renewed < 0:
        return "the lease is lost: the witness says that another holds it"
    return (
        "the lease has ended: its last renewal that was answered was sent"
        f" {now - seen.renewed:.2f} s ago and was good for {seen.lasts:.2f} s"
    )


def _hangs(seen: Seen, now: float, rules: Rules) -> str | None:
    """Why the agent is to be ended; None: it is not."""
    if seen.stopped != 0:
        # Of what another left behind it is told later than of its own.
        inherited = seen.stopped < seen.agent_since
        since = seen.agent_since + rules.grace if inherited else seen.stopped + rules.patience
        if now > max(since, seen.woke + rules.patience):
            return f"the guest has stood still for {now - seen.stopped:.2f} s"
    if seen.spoke != 0:
        since = max(seen.spoke + rules.silence, seen.agent_since + rules.grace)
        if now > max(since, seen.woke + rules.silence):
            return f"it has said nothing for {now - seen.spoke:.2f} s"
    return None
