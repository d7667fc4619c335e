"""Which host is a guest to be moved away from? Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vmckpt.errors import BadInput, OutcomeUnknown
from vmckpt.model.guest import GuestState


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestAt:
    """A guest of the wanted name (or UUID) on a host."""

    host: str
    uuid: str
    state: GuestState


def one_guest(name: str, found: Sequence[GuestAt], *, to: str) -> dict[str, GuestState]:
    """The states of the one guest that is meant, by host.

    Another guest of that name on the target is not meant: preflight will say that it is in the way.
    Raises BadInput if different guests elsewhere have the name.
    """
    elsewhere = {one.uuid for one in found if one.host != to}
    if len(elsewhere) > 1:
        places = " and ".join(one.host for one in found)
        raise BadInput(
            f"different guests are called {name}, on {places}", hint="use --from or the UUID"
        )
    meant = elsewhere or {one.uuid for one in found}
    return {one.host: one.state for one in found if one.uuid in meant}


def holder(name: str, states: Mapping[str, GuestState], *, to: str) -> str | None:
    """The host that has the guest, from its state on each host that knows it; None if none does.

    A paused copy beside a running one is the arriving end of a migration. Two running ones, or
    several paused ones, are for a person: raises OutcomeUnknown.
    """
    running = [host for host, state in states.items() if state.runs]
    active = [host for host, state in states.items() if state.is_active]
    if len(running) > 1:
        raise OutcomeUnknown(
            f"guest {name} runs on {' and '.join(running)}",
            host=running[0],
            hint="find out which one is right and end the other with virsh destroy",
        )
    if running:
        return running[0]
    if len(active) > 1:
        raise OutcomeUnknown(
            f"guest {name} is paused on {' and '.join(active)}; a migration may be switching over",
            host=active[0],
            hint="try again in a few seconds",
        )
    # Shut off it may be defined on several hosts; the target's copy is not the one to move.
    others = [host for host in states if host != to]
    return next(iter(active or others or states), None)
