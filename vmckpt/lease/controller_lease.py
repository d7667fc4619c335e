"""A controller's lease: what it shows when it acts, and when it counts as gone. Pure."""

from dataclasses import dataclass

from vmckpt.units import Seconds

HEARTBEAT = Seconds(5.0)
"""How often a controller says that it lives."""
TTL = Seconds(30.0)
"""For how long that is believed of a controller on another machine."""
MARGIN = Seconds(2.0)
"""A controller stops acting this much before others may take over: clocks do not run alike."""


def abandoned(alive: bool | None, alive_until: float | None, now: float) -> bool:
    """Whether nobody attends an operation any more.

    `alive`: what is seen of its controller's process; None if it is on another machine. Then it
    counts how long the controller's last word is good for, by the same clock as `now`; one that
    never gave its word is left alone.
    """
    if alive is not None:
        return not alive
    return alive_until is not None and alive_until < now


def attended(alive: bool | None, alive_until: float | None, now: float) -> bool | None:
    """What to tell of a controller; None if nothing is known of it."""
    if alive is None and alive_until is None:
        return None
    return not abandoned(alive, alive_until, now)


def holds(beaten: Seconds, now: Seconds, ttl: Seconds = TTL) -> bool:
    """Whether a controller may still act whose last heartbeat that arrived was sent at `beaten`.

    Both by the controller's own clock, which goes on while its machine sleeps. The word was given
    after it was sent, so others wait longer than this.
    """
    return now - beaten <= ttl - MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A lease as its holder knows it; whoever has a smaller token than the last one is refused."""

    resource: str
    token: int
    """Grows each time that the lease changes hands, and never shrinks."""
    operation: str
    """The job that holds it."""


_GUEST = "guest/"


def guest_resource(uuid: str) -> str:
    """The name of the lease on a guest."""
    return _GUEST + uuid


def host_resource(name: str) -> str:
    """The name of the lease on a whole host, for emptying it."""
    return f"host/{name}"


def guest_of(resource: str) -> str | None:
    """The guest that a lease is on; None if it is on something else."""
    return resource.removeprefix(_GUEST) if resource.startswith(_GUEST) else None
