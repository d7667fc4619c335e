"""Collect what a guest and both hosts report before a protection begins. Changes nothing."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any
from xml.etree import ElementTree as ET

from vmckpt.agent import client
from vmckpt.capture import device_limits
from vmckpt.hypervisor import host_facts
from vmckpt.hypervisor import storage as hypervisor_storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import Room
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.protection import agent_client, resync
from vmckpt.protection.preflight import ProtectionFacts
from vmckpt.protection.request import ProtectRequest, Setting
from vmckpt.protection.resync import Before, ImageAdoption
from vmckpt.replication.backup.standby_setup import Image
from vmckpt.units import Bytes, show_bytes

_NONE = ImageAdoption()


async def taking(
    setting: Setting, request: ProtectRequest, guest: Guest, looked: dict[str, Any]
) -> ImageAdoption:
    """Return the existing images on the backup that the standby takes over, with findings.

    There are none unless `request.reverse` is set. `looked`: the primary's answer to "look". Raises
    VmckptError.
    """
    if not request.reverse:
        return _NONE
    disks, known = replicated(looked), request.earlier
    if known is None:
        return resync.decide(None, None, disks, setting.backup.name)
    users: dict[str, tuple[str, str]] = {}
    for host in (setting.primary, setting.backup):  # both hosts may see the same storage
        async with Hypervisor(host) as hypervisor:
            others = await hypervisor_storage.of_others(hypervisor, guest.uuid)
        users |= {
            path: (f"{user.guest} on {host.name}", user.format) for path, user in others.items()
        }
    told = await agent_client.order(
        setting.backup, guest.uuid, "before", images=resync.wanted(known, disks), users=users
    )
    with client.sensible(setting.backup):  # another version may report more fields
        images = {name: Image(**image) for name, image in told["images"].items()}
    seen = Before(runs=told["runs"], images=images)
    return resync.decide(known, seen, disks, setting.backup.name)


def replicated(looked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the disks of a guest that are copied to its standby."""
    return [disk for disk in looked["disks"] if not disk["read_only"] and disk["source"]]


def overlays(
    guest: Guest, looked: dict[str, Any], taken: Collection[str], backup: str
) -> list[Finding]:
    """Return a warning for each overlay whose standby gets a complete image. Pure.

    `taken`: names of the disks whose existing images are reused.
    """
    bases = {disk.target: disk.below[0] for disk in guest.disks if disk.below}
    return [
        Finding(
            code="disk-flattened", severity=Severity.WARNING, where=backup,
            text=f"disk {disk['name']} is an overlay of {bases[disk['name']]}; the standby's image"
            f" has no backing file, and takes up to {show_bytes(disk['size'] or 0)}",
        )
        for disk in replicated(looked)
        if disk["name"] in bases and disk["name"] not in taken
    ]  # fmt: skip


def image_folder(disk: Mapping[str, Any], backup: Host, request: ProtectRequest) -> str:
    """Return the directory on the backup for a disk's new image. Pure.

    Without a directory in the request or the inventory, this is the directory of the source image.
    """
    if request.move is not None:
        return str(PurePosixPath(request.move.images[disk["name"]]).parent)
    given = request.storage or (backup.storage[-1] if backup.storage else None)
    return given or str(PurePosixPath(disk["source"]).parent)


def _needed(
    looked: dict[str, Any], taken: Collection[str], backup: Host, request: ProtectRequest
) -> Mapping[str, Bytes]:
    """Return the bytes that new images need, by directory on the backup. Pure.

    `taken`: disks with an existing image on the backup.
    """
    needed: dict[str, Bytes] = {}
    for disk in replicated(looked):
        name = disk["name"]
        if name in taken or (request.move is not None and name not in request.move.images):
            continue
        folder = image_folder(disk, backup, request)
        needed[folder] = Bytes(needed.get(folder, 0) + int(disk["size"] or 0))
    # The backup's answer also has facts that are needed without a new image.
    return needed or {backup.agent_state: Bytes(0)}


async def _asked(
    backup: Host, guest: str, folders: Iterable[str], files: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the backup's answer about the space in each directory. Raises VmckptError.

    `files`: files that the standby needs; the answer lists those that the backup lacks.
    """
    return await asyncio.gather(
        *(
            agent_client.order(backup, guest, "room", folder=folder, files=files)
            for folder in folders
        )
    )


def _rooms(needed: Mapping[str, Bytes], answers: Sequence[Mapping[str, Any]]) -> tuple[Room, ...]:
    """Return the needed and the free space on each of the backup's file systems. Pure.

    `answers`: the backup's answer for each directory of `needed`.
    """
    found: dict[str, Room] = {}
    for (folder, size), told in zip(needed.items(), answers, strict=True):
        device = str(told["images_device"])
        whole = Bytes(size + (found[device].needed if device in found else 0))
        found[device] = Room(
            device=device, folder=folder, free=Bytes(int(told["images"])), needed=whole, grown=whole
        )
    return tuple(found.values())


async def seen(
    setting: Setting, request: ProtectRequest, guest: Guest, looked: dict[str, Any],
    taken: ImageAdoption = _NONE,
) -> ProtectionFacts:  # fmt: skip
    """Return the facts that preflight checks. Raises VmckptError.

    `looked`: the answer of the primary's agent; `taken`: the former images that the standby adopts.
    """
    # These files are not copied, and the standby's QEMU does not start without them.
    fixed = [one["source"] for one in looked["disks"]
             if one["read_only"] and one["source"] and one["kind"] == "file"]  # fmt: skip
    files = [*guest.boot_files, *fixed]
    needed = _needed(looked, taken.images, setting.backup, request)
    async with Hypervisor(setting.primary) as one, Hypervisor(setting.backup) as other:
        ours, theirs, answers, lease_store = await asyncio.gather(
            host_facts.host_facts(one),
            host_facts.host_facts(other),
            _asked(setting.backup, guest.uuid, needed, files),
            _lease_store(setting, request),
        )
    name_taken = any(guest.name == one.name or guest.uuid == one.uuid for one in theirs.guests)
    root = ET.fromstring(looked["xml"])
    devices = device_limits.kinds(root)
    ours = replace(ours, memory_free=Bytes(ours.memory_free + request.held))
    return ProtectionFacts(
        guest=guest.name, primary=setting.primary.name, backup=setting.backup.name,
        qemu=str(looked["qemu"]), memory=_memory(looked), disks=looked["disks"],
        devices=devices, unsaved=device_limits.unsaved(root), name_taken=name_taken,
        primary_facts=ours, backup_facts=theirs,
        shared_room=(
            Bytes(int(looked["room"]) + request.held), Bytes(int(answers[0]["memory"])),
        ),
        rooms=_rooms(needed, answers),
        has_lease=setting.lease is not None, automatic=request.automatic,
        fence=None if setting.primary.fence is None else setting.primary.fence.in_words,
        max_pause=request.terms.max_pause, missing=tuple(answers[0]["missing"]),
        lease_store=lease_store,
        standby_there=name_taken and await _has_standby(setting.backup, guest.uuid),
        disk_logs=bool(looked["disk_logs"]), epoch_cost=_epoch_cost(setting, looked["epoch_cost"]),
    )  # fmt: skip


def _memory(looked: Mapping[str, Any]) -> list[int]:
    """Return the sizes of all blocks of memory that the standby needs, in bytes. Pure."""
    return [*looked["memory"], *(size for _, size in looked["private"] or ())]


def _epoch_cost(setting: Setting, told: Mapping[str, Any]) -> EpochCost:
    with client.sensible(setting.primary):
        return EpochCost(
            finder=Finder(told["finder"]), why=told["why"], scan=told["scan"],
            written=told["written"],
        )  # fmt: skip


async def _has_standby(backup: Host, guest: str) -> bool:
    return (await agent_client.status(backup, guest)).role == "backup"


async def _lease_store(setting: Setting, request: ProtectRequest) -> Finding | None:
    if setting.lease is None or not request.automatic:
        return None
    from vmckpt.lease import replicas  # noqa: PLC0415 - loading psycopg takes 0.1 s

    return await asyncio.to_thread(replicas.examine, setting.lease)
