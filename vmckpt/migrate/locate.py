"""Which host is a guest to be moved away from? Pure."""

from collections.abc import Mapping

from vmckpt.errors import OutcomeUnknown
from vmckpt.model.guests import GuestState

_RUNS = (GuestState.RUNNING, GuestState.BLOCKED)


def holder(name: str, states: Mapping[str, GuestState], *, to: str) -> str | None:
    """The host that has the guest, from its state on each host that knows it; None if none does.

    A paused copy beside a running one is the arriving end of a migration. Two running ones, or
    several paused ones, are for a person: raises OutcomeUnknown.
    """
    running = [host for host, state in states.items() if state in _RUNS]
    active = [host for host, state in states.items() if state.is_active]
    if len(running) > 1:
        raise OutcomeUnknown(
            f"guest {name} runs on {' and '.join(running)}",
            host=running[0],
            mend="find out which one is right and end the other with virsh destroy",
        )
    if running:
        return running[0]
    if len(active) > 1:
        raise OutcomeUnknown(
            f"guest {name} is paused on {' and '.join(active)}; a migration may be switching over",
            host=active[0],
            mend="try again in a few seconds",
        )
    # Shut off it may be defined on several hosts; the target's copy is not the one to move.
    others = [host for host in states if host != to]
    return next(iter(active or others or states), None)
