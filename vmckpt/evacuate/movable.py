"""What of a guest itself keeps it where it is, whatever policies and other hosts say. Pure."""

from vmckpt.model.guest import Guest


def fixed(guest: Guest) -> str | None:
    """Why a guest that runs cannot move; preflight would say so of any target. None: it can."""
    if (why := tied(guest)) is not None:
        return why
    if guest.snapshots:
        return _snapshots(guest)
    if not guest.state.runs:
        return f"it is {guest.state}"
    return None


def immovable(guest: Guest) -> str | None:
    """Why a guest that is off is not defined elsewhere: nobody tries there before it is started,
    and libvirt moves its definition without what belongs to it."""
    if guest.snapshots:
        return _snapshots(guest)
    if (why := tied(guest)) is not None:
        return why
    if guest.saved:
        return "its memory is saved on its host (managed save): elsewhere it would begin anew"
    if guest.tpm:
        return "its TPM's state is its host's, and moves only while it runs"
    for disk in guest.disks:
        if disk.kind not in ("file", "network") and not disk.read_only:
            return f"nobody can see whether another host has its disk {disk.target} ({disk.kind})"
    return None


def tied(guest: Guest) -> str | None:
    """What of a guest neither moves nor can be saved."""
    if guest.host_devices:
        return f"it holds a device of its host: {guest.host_devices[0]}"
    return None


def _snapshots(guest: Guest) -> str:
    return f"libvirt moves no guest with snapshots; it has {guest.snapshots}"
