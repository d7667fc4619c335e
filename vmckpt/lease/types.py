"""What a controller shows when it changes something. Pure."""

from dataclasses import dataclass


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
