"""Check whether a guest can be protected, and report every reason against it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.capture.device_limits import NOT_REPLICATED, not_replicated
from vmckpt.model.disk import Room
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.model.finding import Finding, Severity, blocker, warning
from vmckpt.model.guest import Refusal
from vmckpt.model.host import HostFacts
from vmckpt.units import MIB, Bytes, Seconds, show_bytes, show_seconds

_SPEED = 4 << 30
"""Bytes compared per second on a slow machine; docs/replication.md has measurements."""
_ROOM = 512 * MIB
"""Memory for epochs in flight, in addition to a copy of the guest's memory."""
_FIXED = Seconds(0.014)
"""The part of an epoch's pause that does not depend on memory; measured by bench/replication.py."""
_COPIED = 1 << 31
"""Bytes of written pages copied per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionFacts:
    """The facts that `check_move` needs, from both hosts, the inventory and the request."""

    guest: str
    primary: str
    backup: str
    qemu: str
    """The QEMU version of the running guest."""
    memory: Sequence[int]
    """Sizes of all blocks of memory that the standby needs, in bytes."""
    disks: Sequence[Mapping[str, Any]]
    """The guest's disks, as model.disk.DiskFacts in JSON."""
    devices: Sequence[str]
    """The kinds of devices in the guest's definition, by libvirt's names."""
    primary_facts: HostFacts
    backup_facts: HostFacts
    name_taken: bool
    """The backup already has a guest with this guest's name or UUID."""
    rooms: tuple[Room, ...]
    """Space for the standby's new images, on each of the backup's file systems."""
    shared_room: tuple[Bytes, Bytes]
    """Free space on the primary's and on the backup's tmpfs, in this order."""
    has_lease: bool
    fence: str | None
    """The primary's fence agent; None if it has no fence agent."""
    automatic: bool
    max_pause: Seconds
    lease_store: Finding | None = None
    """The finding on the lease store's replicas; None if automatic failover uses no lease store."""
    standby_there: bool = False
    """The backup has a standby of this guest from a protection without a journal record."""
    unsaved: Refusal | None = None
    """The first reason why QEMU refuses to save the guest's state; None if there is none."""
    missing: tuple[str, ...] = ()
    """Files of the guest that are not copied and are missing on the backup."""
    epoch_cost: EpochCost
    """How changed pages are found, and what this costs."""
    disk_logs: bool = True
    """The primary has the tools that record the disk writes of an epoch."""


def check_protection(seen: ProtectionFacts) -> list[Finding]:
    """Return all findings, blockers first."""
    found = [
        *_place(seen), *_memory(seen), *_disk_logs(seen), *_disks(seen), *_devices(seen),
        *_decision(seen),
    ]  # fmt: skip
    return sorted(found, key=lambda finding: finding.severity is not Severity.BLOCKER)


def check_move(seen: ProtectionFacts) -> list[Finding]:
    """Return the blockers of a migration by epochs, in addition to those of an ordinary migration.

    `seen.disks`: the disks that are copied; `seen.max_pause`: the allowed downtime.
    """
    found = [
        *_same_qemu(seen), *_memory(seen), *_devices(seen), *_disk_logs(seen), *_disks(seen),
    ]  # fmt: skip
    return [finding for finding in found if finding.severity is Severity.BLOCKER]


def _place(seen: ProtectionFacts) -> Iterator[Finding]:
    if seen.primary == seen.backup:
        yield blocker("same-host", seen.guest, "a standby on the guest's host protects nothing",
                       "name another host with --to")  # fmt: skip
    if seen.standby_there:
        yield blocker(
            "standby-there", seen.backup, f"{seen.backup} already has a standby of {seen.guest}",
            f"run vmckpt unprotect {seen.guest}; add --lost-journal if no journal records it",
        )  # fmt: skip
    elif seen.name_taken:
        yield blocker(
            "name-taken", seen.backup,
            f"{seen.backup} already has a guest with the name or UUID of {seen.guest}",
            f"run virsh list --all on {seen.backup}; if that guest is not needed, undefine it",
        )  # fmt: skip
    for path in seen.missing:
        yield blocker(
            "file-missing", seen.backup,
            f"{path} is missing; the guest needs this file, which is not copied",
            f"copy the file to the same path on {seen.backup}",
        )  # fmt: skip
    yield from _same_qemu(seen)


def _same_qemu(seen: ProtectionFacts) -> Iterator[Finding]:
    ours, theirs = seen.qemu.split(".")[:2], seen.backup_facts.qemu_version.split(".")[:2]
    if ours != theirs:
        yield blocker(
            "qemu-version", seen.backup,
            f"the guest is running in QEMU {seen.qemu}, but {seen.backup} has"
            f" {seen.backup_facts.qemu_version}: only the same version can load its device state",
            "install the same version of QEMU on both hosts",
        )  # fmt: skip


def _memory(seen: ProtectionFacts) -> Iterator[Finding]:
    whole = Bytes(sum(seen.memory))
    compares = seen.epoch_cost.finder is Finder.COMPARE
    needed = Bytes(whole + _ROOM if compares else _ROOM), Bytes(whole + _ROOM)
    hosts = (seen.primary, seen.primary_facts), (seen.backup, seen.backup_facts)
    for (host, facts), free, wanted in zip(hosts, seen.shared_room, needed, strict=True):
        what = _EPOCHS if wanted == _ROOM else _COPY
        if facts.memory_free < wanted:
            yield blocker(
                "memory-short", host,
                f"{host} has {show_bytes(facts.memory_free)} of free memory; {what} need"
                f" {show_bytes(wanted)}",
                "stop another guest there, or choose another host",
            )  # fmt: skip
        on_tmpfs = wanted if compares else _ROOM
        if free < on_tmpfs:
            yield blocker(
                "tmpfs-short", host,
                f"/dev/shm on {host} has {show_bytes(free)} free;"
                f" {what if compares else _EPOCHS} need {show_bytes(on_tmpfs)}",
                "run mount -o remount,size=... /dev/shm there, or choose another host",
            )  # fmt: skip
    yield from _pause(seen, whole)


_EPOCHS = "epochs in flight"
_COPY = "epochs in flight and a copy of the guest's memory"


def expected_pause(cost: EpochCost, memory: Bytes) -> Seconds | None:
    """Return how long an epoch is expected to pause a guest. None: this was not measured."""
    if cost.finder is Finder.COMPARE:
        return Seconds(_FIXED + memory / _SPEED)
    if cost.scan is None:
        return None
    return Seconds(_FIXED + cost.scan + cost.written / _COPIED)


def _pause(seen: ProtectionFacts, whole: Bytes) -> Iterator[Finding]:
    cost = seen.epoch_cost
    pause = expected_pause(cost, whole)
    if pause is None or pause <= seen.max_pause:
        return
    tracked = cost.finder is not Finder.COMPARE
    how = (
        f"a scan of {show_bytes(whole)} takes {show_seconds(cost.scan or 0.0)}, and the guest"
        f" writes {show_bytes(cost.written)} in 0.1 s"
        if tracked
        else f"{show_bytes(whole)} of memory must be compared, because {cost.why}"
    )
    yield blocker(
        "pause-long", seen.guest,
        f"an epoch would pause the guest for about {show_seconds(pause)}, but only"
        f" {show_seconds(seen.max_pause)} is allowed: {how}",
        "allow a longer pause: protect.max_pause in the policy",
    )  # fmt: skip


def _disk_logs(seen: ProtectionFacts) -> Iterator[Finding]:
    if not seen.disk_logs and any(not one["read_only"] and one["source"] for one in seen.disks):
        yield blocker(
            "nbdkit-missing", seen.primary,
            f"{seen.primary} lacks nbdkit or its Python plugin, which records the guest's disk"
            " writes",
            "install nbdkit and nbdkit-plugin-python there",
        )  # fmt: skip


def _disks(seen: ProtectionFacts) -> Iterator[Finding]:
    for disk in seen.disks:
        where = f"{seen.guest}'s {disk['name']}"
        if not disk["read_only"] and disk["source"] is not None:
            if (found := _unsuitable(disk, where)) is not None:
                code, text, hint = found
                yield blocker(code, seen.guest, text, hint)
        # Files are not reported here: missing files are blockers of their own.
        elif disk["source"] is not None and disk["kind"] != "file":
            yield warning(
                "disk-read-only", seen.guest,
                f"{where} is read-only and not copied: {disk['source']} must also exist on the"
                " backup",
            )  # fmt: skip
    for room in seen.rooms:
        if room.free < room.needed:
            yield blocker(
                "room-short", seen.backup,
                f"{seen.backup} has {show_bytes(room.free)} of free space for images in"
                f" {room.folder}; the guest's disks need {show_bytes(room.needed)} there",
                "choose another directory with --storage",
            )  # fmt: skip


def _unsuitable(disk: Mapping[str, Any], where: str) -> tuple[str, str, str] | None:
    """Return why a writable disk cannot be replicated, as a code, a text and a hint; None if it
    can."""
    if disk["shareable"]:
        return (
            "disk-shared",
            f"{where} is shareable: data that other guests have read cannot be rolled back",
            "give the guest a disk of its own",
        )
    if disk["device"] == "lun":
        return (
            "disk-lun",
            f"{where} passes SCSI commands through to a device; what they write is not replicated",
            "use device='disk' instead of device='lun', and restart the guest",
        )
    if disk["node"] is None or disk["size"] is None:
        return (
            "disk-unknown", f"QEMU does not report the size or node of {where}",
            "detach the disk, or use an image file",
        )  # fmt: skip
    if disk["kind"] not in ("file", "block"):
        return (
            "disk-kind",
            f"{where} has type {disk['kind']}; only file and block are replicated",
            "use an image file for the disk",
        )
    if disk["format"] not in ("raw", "qcow2"):
        return (
            "disk-format", f"{where} is {disk['format']}, neither raw nor qcow2",
            "with the guest off, convert the image and use the new one: qemu-img convert -O qcow2"
            f" {disk['source']} {disk['source']}.qcow2",
        )  # fmt: skip
    return None


def _devices(seen: ProtectionFacts) -> Iterator[Finding]:
    if seen.unsaved is not None:
        what, hint = f"{seen.unsaved.what}: QEMU cannot save its state", seen.unsaved.hint
        yield blocker(seen.unsaved.code, seen.guest, what, hint)
    for kind in sorted(set(seen.devices) & set(NOT_REPLICATED)):
        yield blocker(f"device-{kind}", seen.guest, *not_replicated(kind, seen.guest))
    outputs = sorted(set(seen.devices) & {"serial", "graphics", "channel"})
    if outputs:
        yield warning(
            "output-not-held", seen.guest,
            f"output via {', '.join(outputs)} is not buffered; it is sent before the backup has the"
            " epoch that produced it",
        )  # fmt: skip


def _decision(seen: ProtectionFacts) -> Iterator[Finding]:
    if seen.automatic and not seen.has_lease and seen.fence is None:
        yield blocker(
            "no-lease", seen.guest,
            "without a lease store or a fence agent, vmckpt cannot know that a silent host is dead",
            "add lease: postgresql://user@host/database to the inventory, or fence: to"
            f" {seen.primary}, or use --failover manual",
        )  # fmt: skip
    elif seen.automatic and not seen.has_lease:
        yield warning(
            "watched", seen.guest,
            f"only vmckpt run fails over automatically, after {seen.fence} has powered"
            f" {seen.primary} off: start vmckpt run on a third machine and keep it running",
        )  # fmt: skip
    if seen.lease_store is not None and seen.lease_store.severity is Severity.WARNING:
        yield seen.lease_store
    if not seen.automatic:
        yield warning(
            "by-hand", seen.guest,
            f"failover is manual: run vmckpt failover {seen.guest} if needed",
        )  # fmt: skip
