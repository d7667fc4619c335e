"""What the agents of a protection say when a host may be dead, and the case that they make."""

from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.host_death import Case

WELL = {"role": "primary", "agent": True, "runs": True, "phase": "protecting"}
HANGS = {"role": "primary", "agent": False, "runs": True, "says": "no agent answers"}
ODD = {"role": None}
ANEW = {"role": None, "runs": False}
DIED = {"role": "primary", "runs": False, "outcome": "died", "why": "its QEMU died"}
DIED_ALONE = {**DIED, "alone": True}
SWITCHED = {"role": "primary", "runs": False, "outcome": "switched"}
ENDING = {"role": "primary", "runs": False, "agent": True, "phase": "protecting"}
ENDED = {"role": "primary", "runs": False, "outcome": "ended"}
DEAD = {"error": "alpha: ssh to alpha:22: no answer in 8 s", "unreachable": True, "silent": True}
REFUSES = {"error": "alpha: ssh login was refused", "unreachable": True, "silent": False}
READY = {"role": "backup", "ready": True, "connected": False, "silent_s": 9.0}
HEARS = {**READY, "connected": True, "silent_s": 0.1}
EMPTY = {"role": "backup", "ready": False, "silent_s": 9.0, "says": "synchronising"}
OVER = {"role": "backup", "outcome": "failed-over"}
GONE = {"error": "beta: no answer", "unreachable": True, "silent": True}
CASE = Case(
    guest="web1", primary="alpha", backup="beta", ours=parse_answer(DEAD),
    theirs=parse_answer(READY), has_lease=False, has_fence=True, word=False, fence=False,
)  # fmt: skip
