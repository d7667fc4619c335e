"""The lease of a controller on a job: heartbeats, tokens, and when it counts as expired. Pure."""

from dataclasses import dataclass

from vmckpt.units import Seconds

HEARTBEAT = Seconds(5.0)
"""Interval between the heartbeats of a controller."""
TTL = Seconds(30.0)
"""How long a heartbeat of a controller on another machine is valid."""
MARGIN = Seconds(2.0)
"""A controller stops acting this long before others may take over: their clocks differ in rate."""


def abandoned(alive: bool | None, alive_until: float | None, now: float) -> bool:
    """Return whether an operation has no live controller.

    `alive`: whether the process of its controller exists; None if it is on another machine. In that
    case the end of the last heartbeat's validity, `alive_until`, decides, by the same clock as
    `now`. An operation whose controller never sent a heartbeat does not count as abandoned.
    """
    if alive is not None:
        return not alive
    return alive_until is not None and alive_until < now


def attended(alive: bool | None, alive_until: float | None, now: float) -> bool | None:
    """Return whether an operation has a live controller, for display; None if that is unknown."""
    if alive is None and alive_until is None:
        return None
    return not abandoned(alive, alive_until, now)


def holds(beaten: Seconds, now: Seconds, ttl: Seconds = TTL) -> bool:
    """Return whether a controller may still act.

    `beaten`: when it sent the last heartbeat that arrived, by its own clock, which counts the time
    that its machine is suspended; so does `now`. A heartbeat is written after it is sent, so others
    wait longer than this.
    """
    return now - beaten <= ttl - MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A lease as its holder knows it. A holder with a smaller token than the last is refused."""

    resource: str
    token: int
    """Grows each time that the lease gets another holder, and never shrinks."""
    operation: str
    """The job that holds it."""


_GUEST = "guest/"


def guest_resource(uuid: str) -> str:
    """Return the name of the lease on a guest."""
    return _GUEST + uuid


def host_resource(name: str) -> str:
    """Return the name of the lease on a host, which an evacuation holds."""
    return f"host/{name}"


def guest_of(resource: str) -> str | None:
    """Return the UUID of the guest that a lease is on; None if the lease is not on a guest."""
    return resource.removeprefix(_GUEST) if resource.startswith(_GUEST) else None
