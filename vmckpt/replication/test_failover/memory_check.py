"""Whether a backup has room for one more copy of the guest. Pure."""

from dataclasses import dataclass

from vmckpt.units import GIB, MIB, Bytes, show_bytes

_EPOCHS = Bytes(512 * MIB)
"""What epochs on their way may take: it is theirs, not a test's."""
KEPT = Bytes(GIB)
"""What stays free beside images for everybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free."""

    wanted: Bytes
    """The guest's memory."""
    shared: Bytes
    """On the tmpfs where its memory is."""
    memory: Bytes
    disks: Bytes | None
    """Where the standby's images are; None: it has none."""


def why_not(room: Room) -> str | None:
    """Why there can be no test; None: there can be one."""
    wanted = Bytes(room.wanted + _EPOCHS)
    for what, free in (("of memory", room.memory), ("on the tmpfs of memory", room.shared)):
        if free < wanted:
            return (
                f"has {show_bytes(free)} free {what}; another copy of the guest's memory and epochs"
                f" on their way take {show_bytes(wanted)}"
            )
    if room.disks is not None and room.disks < KEPT:
        return (
            f"has {show_bytes(room.disks)} free beside the standby's images, and"
            f" {show_bytes(KEPT)} must be"
        )
    return None


def runs_out(disks: Bytes) -> bool:
    """Whether a test that runs must end, before the standby's images cannot grow any more."""
    return disks < KEPT // 2
