"""Check that the target has all disks of a guest, and that they are the same. Pure."""

from collections.abc import Iterator

from vmckpt.capture.device_limits import DISKS_OUTSIDE
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer
from vmckpt.migration.plan.facts import Facts
from vmckpt.model.finding import Finding, blocker, warning
from vmckpt.model.guest import Disk, Guest

LIBVIRT_DECIDES = "; libvirt decides whether to migrate the guest"
"""End of the text of a finding "storage-unproven"."""
_MAY_BE_EMPTY = ("file", "block")
"""Types of drives that have no source while they are empty."""


def storage_proven(facts: Facts) -> bool:
    """Return whether every writable disk is confirmed to be the same on both hosts.

    Disks of type "network" count as the same. False if the guest is unknown.
    """
    if facts.guest is None:
        return False
    written = [
        disk for disk in facts.guest.disks
        if not disk.read_only and (disk.source or disk.kind not in _MAY_BE_EMPTY)
    ]  # fmt: skip
    return all(
        (disk.kind == "network" or _same(facts, disk) is True)
        and not disk.on_device
        and all(facts.same_file.get(path) is True for path in _parts(disk))
        for disk in written
    )


def _parts(disk: Disk) -> tuple[str, ...]:
    """Return the other files of which the disk consists."""
    return disk.below if disk.data_file is None else (*disk.below, disk.data_file)


def _same(facts: Facts, disk: Disk) -> bool | None:
    """Return whether both hosts see the same file or device; None if unknown."""
    return facts.same_file.get(disk.source or "") if disk.kind in _MAY_BE_EMPTY else None


def storage_findings(facts: Facts, guest: Guest) -> Iterator[Finding]:
    """Yield the findings about all disks of the guest."""
    for disk in guest.disks:
        if disk.kind in DISKS_OUTSIDE:
            yield blocker(
                "storage-not-visible", facts.target,
                f"disk {disk.target} of {guest.name} ({disk.kind}) is a device of {facts.source}",
                "detach the disk first, or use an image that both hosts can access",
            )  # fmt: skip
        elif disk.source is not None:
            yield from _disk(facts, guest, disk)


def _disk(facts: Facts, guest: Guest, disk: Disk) -> Iterator[Finding]:
    what = f"disk {disk.target} of {guest.name} ({disk.source})"
    if disk.source in facts.copied:
        return
    if disk.cache == "unsafe" and not disk.read_only:
        yield blocker(
            "cache-mode",
            guest.name,
            f"{what} has cache=unsafe: written data may exist only in {facts.source}'s memory",
            "set cache='none' and restart the guest",
        )
    yield from _below(facts, disk, what)
    same = _same(facts, disk)
    if facts.on_target.get(disk.source or "") is False:
        yield _missing(facts, guest, disk, what)
    elif same is False and disk.read_only:
        yield warning(
            "storage-read-only", facts.target,
            f"{what} is a different file there: the guest continues with that file's data",
            f"compare the two files, or copy the file from {facts.source}",
        )  # fmt: skip
    elif same is False:
        yield blocker(
            "storage-not-visible", facts.target, f"{what} is not the same on both hosts",
            _share(facts),
        )  # fmt: skip
    elif same is None and disk.kind != "network" and not _reported(facts, disk):
        yield _unproven(guest, disk, what)
    if disk.data_file is not None:
        yield from _data_file(facts, guest, disk, disk.data_file)


def _reported(facts: Facts, disk: Disk) -> bool:
    """Return whether the disk need not be the same, or whether another finding covers it."""
    return disk.read_only or any(
        one.device == f"disk {disk.target}"
        and one.kind in (Kind.POOL, Kind.VOLUME)
        and answer is not Answer.PRESENT
        for one, answer in facts.answers.items()
    )


def _share(facts: Facts) -> str:
    return (
        f"give {facts.source} and {facts.target} access to the same disk, or, if the disk is a"
        " qcow2 or raw file, copy it with --copy-storage thin"
    )


def _missing(facts: Facts, guest: Guest, disk: Disk, what: str) -> Finding:
    if disk.optional:
        return warning(
            "medium-dropped", facts.target, f"{what} is missing: libvirt ejects it during the move"
        )
    if disk.removable:
        hint = (
            f"eject it: run virsh change-media {guest.name} {disk.target} --eject on {facts.source}"
        )
    elif disk.read_only:
        hint = f"copy the file from {facts.source}, or share its directory between the hosts"
    else:
        hint = _share(facts)
    return blocker("storage-not-visible", facts.target, f"{what} is missing", hint)


_PROVE = {
    "file": "in the inventory, add ssh logins that can write to the disk's directory",
    "block": "compare the devices' WWNs or UUIDs: run lsblk -o NAME,WWN,UUID on both hosts",
}
"""How to find out whether both hosts have the same disk, by libvirt's type of the disk."""


def _unproven(guest: Guest, disk: Disk, what: str) -> Finding:
    return warning(
        "storage-unproven", guest.name,
        f"it is unknown whether {what} is the same on both hosts{LIBVIRT_DECIDES}",
        _PROVE.get(disk.kind, "make sure that both hosts have the same data under this name"),
    )  # fmt: skip


def _data_file(facts: Facts, guest: Guest, disk: Disk, path: str) -> Iterator[Finding]:
    """Check the external data file of a qcow2 image, which has all data of the disk."""
    what = f"{path}, the data file of disk {disk.target} of {guest.name},"
    share = f"share its directory between {facts.source} and {facts.target}"
    if facts.on_target.get(path) is False:
        yield blocker("storage-not-visible", facts.target, f"{what} is missing", share)
    elif facts.same_file.get(path) is False:
        yield blocker(
            "storage-not-visible", facts.target, f"{what} is not the same on both hosts", share
        )
    elif facts.same_file.get(path) is None:
        yield warning(
            "storage-unproven", guest.name,
            f"it is unknown whether {what} is the same on both hosts{LIBVIRT_DECIDES}",
            _PROVE["file"],
        )  # fmt: skip


def _below(facts: Facts, disk: Disk, what: str) -> Iterator[Finding]:
    """Check the backing images of a disk."""
    for path in disk.below:
        if facts.on_target.get(path) is False:
            yield blocker(
                "storage-not-visible", facts.target,
                f"{path}, a backing image of {what}, is missing",
                f"share its directory between {facts.source} and {facts.target}",
            )  # fmt: skip
        elif facts.same_file.get(path) is False:
            yield warning(
                "storage-backing", facts.target,
                f"{path}, a backing image of {what}, is a different file there: both files must"
                " have the same data",
                "compare the two files, or share the directory between"
                f" {facts.source} and {facts.target}",
            )  # fmt: skip
