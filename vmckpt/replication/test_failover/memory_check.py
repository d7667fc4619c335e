"""Check whether a backup has enough space for another copy of the guest. Pure."""

from dataclasses import dataclass

from vmckpt.units import GIB, MIB, Bytes, show_bytes

_EPOCHS = Bytes(512 * MIB)
"""Memory that is reserved for epochs in flight."""
KEPT = Bytes(GIB)
"""Space that must stay free on the file system of the standby's images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The space that a test needs, and the free space on the backup."""

    wanted: Bytes
    """Size of the guest's memory."""
    shared: Bytes
    """Free space on the tmpfs that contains the standby's memory."""
    memory: Bytes
    """Free memory of the host."""
    disks: Bytes | None
    """Free space on the file system of the standby's images; None: the standby has no images."""


def why_not(room: Room) -> str | None:
    """Return why there is too little space for a test; None: there is enough.

    The text follows the host's name in a message.
    """
    wanted = Bytes(room.wanted + _EPOCHS)
    for what, free in (
        ("of free memory", room.memory),
        ("free on the tmpfs for memory", room.shared),
    ):
        if free < wanted:
            return (
                f"has {show_bytes(free)} {what}; the test needs {show_bytes(wanted)}, for a copy"
                " of the guest's memory and for epochs in flight"
            )
    if room.disks is not None and room.disks < KEPT:
        return (
            f"has {show_bytes(room.disks)} free on the file system of the standby's images;"
            f" {show_bytes(KEPT)} must stay free"
        )
    return None


def runs_out(disks: Bytes) -> bool:
    """Return whether a running test must end because the standby's images may run out of space.

    `disks`: free space on the file system of the images.
    """
    return disks < KEPT // 2
