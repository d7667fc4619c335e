"""Pulling in what of a running guest's disk is behind its image."""

from dataclasses import dataclass

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import library, parse
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


def owner(uri: str, host: str) -> tuple[int, int]:
    """As whom libvirt runs QEMU there: user and group. Raises HypervisorError."""
    with library.opened(uri, host) as connection:
        try:
            return owner_in(connection.getCapabilities())
        except libvirt.libvirtError as exc:
            raise library.refused(exc, host=host, what="asking as whom QEMU runs") from exc
        except ValueError as exc:
            raise HypervisorError(f"{host}: as whom QEMU runs: {exc}", host=host) from exc


def owner_in(capabilities: str) -> tuple[int, int]:
    """The same out of libvirt's capabilities; root if they do not say. Raises ValueError."""
    for model in parse.tree(capabilities, "capabilities").findall("host/secmodel"):
        if model.findtext("model") == "dac":
            for label in model.findall("baselabel"):
                user, _, group = (label.text or "").lstrip("+").partition(":+")
                return int(user), int(group)
    return 0, 0
