"""Collect what a guest and both hosts report before a protection begins. Changes nothing."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

from vmckpt.agent import client
from vmckpt.hypervisor import host_facts
from vmckpt.hypervisor import storage as hypervisor_storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.lease import replicas
from vmckpt.model.disk import Room
from vmckpt.model.finding import Finding
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.protection import agent_client, resync
from vmckpt.protection.preflight import ProtectionFacts
from vmckpt.protection.request import ProtectRequest, Setting
from vmckpt.protection.resync import Before, ImageAdoption
from vmckpt.replication.backup.standby_setup import Image
from vmckpt.units import Bytes

_NONE = ImageAdoption()


async def taking(
    setting: Setting, request: ProtectRequest, guest: Guest, looked: dict[str, Any]
) -> ImageAdoption:
    """Return the existing images on the backup that the standby takes over. Raises VmckptError."""
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


def _copied(looked: dict[str, Any], taken: Collection[str]) -> Bytes:
    new = [disk for disk in replicated(looked) if disk["name"] not in taken]
    return Bytes(sum(int(disk["size"] or 0) for disk in new))


async def seen(
    setting: Setting, request: ProtectRequest, guest: Guest, looked: dict[str, Any],
    taken: ImageAdoption = _NONE,
) -> ProtectionFacts:  # fmt: skip
    """Return the facts that preflight checks. Raises VmckptError."""
    # These files are not copied, and the standby's QEMU does not start without them.
    fixed = [one["source"] for one in looked["disks"]
             if one["read_only"] and one["source"] and one["kind"] == "file"]  # fmt: skip
    files = [*guest.boot_files, *fixed]
    async with Hypervisor(setting.primary) as one, Hypervisor(setting.backup) as other:
        ours, theirs, room = await asyncio.gather(
            host_facts.host_facts(one),
            host_facts.host_facts(other),
            agent_client.order(
                setting.backup, guest.uuid, "room", folder=_folder(setting, request), files=files
            ),
        )
    name_taken = any(guest.name == one.name or guest.uuid == one.uuid for one in theirs.guests)
    devices = [node.tag for node in ET.fromstring(looked["xml"]).findall("devices/*")]
    ours = replace(ours, memory_free=Bytes(ours.memory_free + request.held))
    copied = _copied(looked, taken.images)
    return ProtectionFacts(
        guest=guest.name, primary=setting.primary.name, backup=setting.backup.name,
        qemu=str(looked["qemu"]), memory=looked["memory"], disks=looked["disks"],
        devices=devices, primary_facts=ours, backup_facts=theirs, name_taken=name_taken,
        taken=taken.images, shared_room=(
            Bytes(int(looked["room"]) + request.held), Bytes(int(room["memory"])),
        ),
        room=Room(
            device=room["images_device"], folder=_folder(setting, request),
            free=Bytes(int(room["images"])), needed=copied, grown=copied,
        ),
        has_lease=setting.lease is not None, automatic=request.automatic,
        fence=None if setting.primary.fence is None else setting.primary.fence.in_words,
        max_pause=request.terms.max_pause, missing=tuple(room["missing"]),
        lease_store=await _lease_store(setting, request),
        standby_there=name_taken and await _has_standby(setting.backup, guest.uuid),
        disk_logs=bool(looked["disk_logs"]),
    )  # fmt: skip


async def _has_standby(backup: Host, guest: str) -> bool:
    return (await agent_client.status(backup, guest)).role == "backup"


async def _lease_store(setting: Setting, request: ProtectRequest) -> Finding | None:
    if setting.lease is None or not request.automatic:
        return None
    return await asyncio.to_thread(replicas.examine, setting.lease)


def _folder(setting: Setting, request: ProtectRequest) -> str:
    """Return the backup's directory for the standby's images; by default the agent's directory."""
    storage = setting.backup.storage
    return request.storage or (storage[-1] if storage else setting.backup.agent_state)
