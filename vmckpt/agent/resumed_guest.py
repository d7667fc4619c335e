"""Tell a guest that it continues from an earlier state: set its clock, and run its hooks.

The guest's hooks are the executable files in /etc/vmckpt/resumed.d in the guest, in the order of
their names. The guest agent runs them. docs/snapshots.md describes what they receive.
"""

import secrets
import time
from dataclasses import dataclass
from enum import StrEnum

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.units import Seconds

HOOKS = "/etc/vmckpt/resumed.d"
_ANSWERS = Seconds(10.0)
"""How long to wait for a guest agent that was running in the earlier state."""
_TURN = Seconds(0.2)
_SETS = Seconds(15.0)
"""Time limit for setting the clock; the guest agent also sets the hardware clock (hwclock)."""
_EXIT = Seconds(60.0)
"""Time limit for all hooks together."""
_SEED = 64
_SCRIPT = f"""\
VMCKPT_SEED=$(cat)
export VMCKPT_SEED VMCKPT_REASON="$1" VMCKPT_GUEST="$2"
for hook in {HOOKS}/*; do
    [ -f "$hook" ] && [ -x "$hook" ] || continue
    "$hook" </dev/null || {{ echo "$hook: exit status $?" >&2; failed=1; }}
done
exit ${{failed:-0}}
"""


class Reason(StrEnum):
    """Why a guest continues from an earlier state."""

    RESTORE = "restore"
    """The guest itself was restored from a snapshot."""
    FORK = "fork"
    """The guest is a copy that exists beside its original."""
    FAILOVER = "failover"
    """The guest continues from the last epoch on its backup host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What could not be done for a guest that continues from an earlier state."""

    clock: str = ""
    """Why its clock was not set; empty: it was set."""
    hooks: str = ""
    """Why its hooks may not have had their effect; empty: they succeeded, or there are none."""


def tell(agent: GuestAgent, reason: Reason, guest: str) -> Resumed:
    """Set the guest's clock to the host's time, and run its hooks. `guest`: the guest's name.

    The hooks also receive 64 random bytes, so that two guests that continue from the same state do
    not generate the same random numbers.
    """
    if not answers(agent):
        why = "its guest agent does not answer"
        return Resumed(clock=why, hooks=why)
    clock = ""
    try:
        agent.set_time(Seconds(time.time()), limit=_SETS)
    except HypervisorError as exc:
        clock = exc.message
    return Resumed(clock=clock, hooks=run_hooks(agent, reason, guest))


def answers(agent: GuestAgent) -> bool:
    """Wait up to 10 s for the agent. Returns whether it answers. Raises HypervisorError."""
    give_up = time.monotonic() + _ANSWERS
    while not agent.there(limit=Seconds(2.0)):
        if time.monotonic() > give_up:
            return False
        time.sleep(_TURN)
    return True


def run_hooks(agent: GuestAgent, reason: Reason, guest: str) -> str:
    """Run the guest's hooks. Returns why they may not have had their effect; empty: success."""
    seed = secrets.token_hex(_SEED).encode()
    words = ("-c", _SCRIPT, "vmckpt", str(reason), guest)
    try:
        status, said = agent.execute("/bin/sh", *words, limit=_EXIT, stdin=seed)
    except HypervisorError as exc:
        return exc.message
    return "" if status == 0 else said or f"exit status {status}"
