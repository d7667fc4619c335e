"""Pulling in what of a running guest's disk is behind its image."""

from dataclasses import dataclass

import libvirt

from vmckpt.hypervisor.seat import Seat


@dataclass(frozen=True, slots=True)
class Pull:
    """How far a pull is, in bytes."""

    done: int
    total: int


def begin(seat: Seat, disk: str) -> None:
    """Begin to pull a disk in; it goes on in QEMU. Raises HypervisorError."""
    seat.on_domain("pulling a disk in", lambda domain: domain.blockPull(disk), changes=True)


def progress(seat: Seat, disk: str) -> Pull | None:
    """None: nothing is pulled. Raises HypervisorError."""
    told = seat.on_domain("looking at a pull", lambda domain: domain.blockJobInfo(disk))
    if not told:
        return None
    return Pull(int(told.get("cur", 0)), int(told.get("end", 0)))


def stopped_by_disk(seat: Seat) -> bool:
    """Whether the guest stands still because a disk could not be read."""
    state = seat.on_domain("asking for the guest's state", lambda domain: domain.state())
    return tuple(state) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)
