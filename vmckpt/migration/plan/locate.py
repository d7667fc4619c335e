"""Find the host from which a guest is to be moved. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vmckpt.errors import BadInput, OutcomeUnknown
from vmckpt.model.guest import MEND, GuestState


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestAt:
    """A guest with the requested name or UUID, and the host that has it."""

    host: str
    uuid: str
    state: GuestState


def one_guest(name: str, found: Sequence[GuestAt], *, to: str) -> dict[str, GuestState]:
    """Return the states of the one guest that `name` refers to, by host; empty if not found.

    A different guest with that name on the target is ignored; preflight reports the conflict.
    Raises BadInput if different guests on other hosts have the name.
    """
    elsewhere = {one.uuid for one in found if one.host != to}
    if len(elsewhere) > 1:
        places = " and ".join(one.host for one in found)
        raise BadInput(
            f"different guests on {places} are named {name}", hint="use --from or the UUID"
        )
    meant = elsewhere or {one.uuid for one in found}
    return {one.host: one.state for one in found if one.uuid in meant}


def holder(name: str, states: Mapping[str, GuestState], *, to: str) -> str | None:
    """Return the host that has the guest, given its state on each host; None if no host has it.

    `to`: the migration's target, where a definition does not count if another host has the guest. A
    running copy counts even if another copy is paused: the paused copy is the other end of a
    migration. Raises OutcomeUnknown if two copies are running, or if none is running and several
    are active, as during a switchover. The hosts must be different hosts; see model.same_host.
    """
    running = [host for host, state in states.items() if state.runs]
    active = [host for host, state in states.items() if state.is_active]
    if len(running) > 1:
        raise OutcomeUnknown(
            f"guest {name} is running on {' and '.join(running)}",
            host=running[0],
            hint=f"{MEND}; destroy the copy that is not needed",
        )
    if running:
        return running[0]
    if len(active) > 1:
        raise OutcomeUnknown(
            f"guest {name} is active, but not running, on {' and '.join(active)}; a migration may"
            " be switching over",
            host=active[0],
            hint="try again in a few seconds",
        )
    # A shut-off guest may be defined on several hosts; the definition on the target is not moved.
    others = [host for host in states if host != to]
    return next(iter(active or others or states), None)
