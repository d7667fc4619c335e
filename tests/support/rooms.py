"""Room for images on targets, and moves that need it."""

from tests.support.fleets import guest
from vmckpt.evacuation.plan.placement import Assignment
from vmckpt.model.disk import Room
from vmckpt.units import GIB, Bytes


def room(needed: float, free: float, device: str = "8:1") -> Room:
    """In GiB."""
    return Room(device=device, folder="/images", free=Bytes(int(free * GIB)),
                needed=Bytes(int(needed * GIB)), grown=Bytes(int(needed * GIB)))  # fmt: skip


def goes(name: str, target: str) -> Assignment:
    return Assignment(tenant=guest(name, "alpha"), target=target, why="")
