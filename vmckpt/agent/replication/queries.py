"""Read-only orders of protections: query a guest, free space, and existing images."""

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.replication import devices
from vmckpt.agent.restore import backing_chain
from vmckpt.capture import device_limits, migration_settings, network_hold
from vmckpt.capture.disks import bitmaps
from vmckpt.capture.memory import memory_files, ram_blocks, tracker
from vmckpt.capture.memory.write_tracking import CannotTrack, Why
from vmckpt.capture.migration_settings import IGNORE_SHARED, Undo
from vmckpt.capture.qemu_stream import device_state
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor import block, domain_xml
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.dirty_pages import epoch_cost
from vmckpt.replication.disks import nbdkit_server
from vmckpt.replication.session import Session, folder_of
from vmckpt.units import Seconds
from vmckpt.util import host_directories

_TURN = 0.05
_EPOCH = Seconds(5.0)
"""How long to wait for the end of an epoch."""


def protection_facts(order: ReplicaOrder) -> dict[str, Any]:
    """Return the facts about a running guest that a protection needs.

    Raises CannotCapture if the guest cannot be protected, HypervisorError, RemoteError, OSError.
    """
    host_directories.require_own_directory()
    with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
        with identity.require(order.guest, monitor.name, order.host) as process:
            try:
                memory = _memory_facts(monitor, process, order.finder)
            except CannotCapture as exc:
                # A device that cannot be replicated is often why memory must be compared.
                if (because := _because_of_devices(monitor)) is None:
                    raise
                raise because from exc
        bitmaps.require_reopen(monitor)
        # Read before the cards and the definition, to notice a device that is added meanwhile.
        seen = devices.device_facts(monitor)
        held = network_hold.hold_facts(monitor)
        undo = _settings(order, monitor)
        described = monitor.described()
        known = monitor.on_domain("reading the guest's disks", block.nodes)
        disks = block.read_facts(described, known)
        stored = libvirt_side.stored(monitor)
        return {
            "name": monitor.name, "undo": undo.to_json(), "cards": held.cards, "devices": seen,
            **memory, "xml": monitor.xml(), "room": _room(host_directories.SHM),
            "disk_logs": nbdkit_server.installed(),
            "definition": stored[0] if stored else "", "autostart": bool(stored and stored[1]),
            "qemu": monitor.qemu_version(), "disks": [asdict(disk) for disk in disks],
        }  # fmt: skip


def _because_of_devices(monitor: QmpMonitor) -> CannotCapture | None:
    """Return the error about devices that cannot be replicated; None if there are none."""
    root = domain_xml.tree(monitor.described(), "domain")
    kinds = sorted(set(device_limits.kinds(root)) & set(device_limits.NOT_REPLICATED))
    reasons = [device_limits.not_replicated(kind, monitor.name) for kind in kinds]
    if not reasons:
        return None
    why = "; ".join(text for text, _ in reasons)
    return CannotCapture(f"{monitor.name} on {monitor.host}: {why}", hint=reasons[0][1])


def _memory_facts(monitor: QmpMonitor, process: HeldProcess, finder: str) -> dict[str, Any]:
    """Return sizes of the guest's memory, the private blocks, and what an epoch costs.

    "private" is None if changed pages must be found by comparison. `finder`: see ReplicaOrder.
    Raises CannotCapture if comparison is also impossible or not wanted, and HypervisorError.
    """
    try:
        if finder == Finder.COMPARE:
            raise CannotTrack(process.pid, Why.NOT_WANTED)
        if not device_state.is_possible(monitor):
            raise CannotTrack(process.pid, Why.NOT_SUPPORTED)
        found = ram_blocks.find(monitor, process)
    except CannotTrack as exc:
        cost = EpochCost(finder=Finder.COMPARE, why=exc.message)
    else:
        tracker.end(monitor.guest)  # the tracker of snapshots; the next one reads all memory
        cost = epoch_cost.measure(
            process, [one.range for one in (*found.guest, *found.private)],
            Finder(finder) if finder else None,
        )  # fmt: skip
        if cost.finder is not Finder.COMPARE:
            return {
                "memory": [one.range.size for one in found.guest],
                "private": [[one.name, one.range.size] for one in found.private],
                "epoch_cost": asdict(cost),
            }  # fmt: skip
    if finder not in ("", Finder.COMPARE):
        raise CannotCapture(
            f"the writes of {monitor.name} on {monitor.host} cannot be tracked: {cost.why}",
            hint=f"run vmckpt doctor {monitor.host}, or omit --finder {finder}",
        )
    files = memory_files.files(monitor, process)
    return {
        "memory": [file.size for file in files], "private": None, "epoch_cost": asdict(cost),
    }  # fmt: skip


def _settings(order: ReplicaOrder, monitor: QmpMonitor) -> Undo:
    """Return QEMU's migration settings. Waits for the end of an epoch if the guest is protected.

    Raises CannotCapture.
    """
    protected = Session.read(folder_of(order.guest)) is not None
    give_up = time.monotonic() + (_EPOCH if protected else 0.0)
    while True:
        try:
            return migration_settings.settings_facts(
                monitor, want=IGNORE_SHARED, runs=True, folder=None
            )
        except CannotCapture:
            if time.monotonic() >= give_up:
                raise
        time.sleep(_TURN)


def _made(folder: Path) -> Path:
    """Return the directory itself if it exists, or its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _room(folder: Path) -> int:
    """Return the free bytes on a directory's file system."""
    stat = os.statvfs(_made(folder))
    return stat.f_bavail * stat.f_frsize


def rooms(order: ReplicaOrder) -> dict[str, Any]:
    """Return the free space on the backup, in bytes: "memory" for memory and epochs, and "images".

    Also returns the device number of the images' file system, and which of the order's files are
    "missing" on the backup. Raises RemoteError, OSError.
    """
    host_directories.require_own_directory()
    missing, folder = [one for one in order.files if not Path(one).exists()], Path(order.folder)
    device = str(_made(folder).stat().st_dev)
    return {
        "memory": _room(host_directories.SHM), "images": _room(folder), "images_device": device,
        "missing": missing,
    }  # fmt: skip


def before(order: ReplicaOrder) -> dict[str, Any]:
    """Inspect what an earlier run of a guest left on this host.

    Returns whether its QEMU process still exists, under "runs", and facts about its images, under
    "images". Raises QemuUnclear.
    """
    users = backing_chain.of_others((Path(path) for path, _ in order.images.values()), order.users)
    found = {
        name: asdict(
            replace(
                standby_setup.inspect_image(path, format_), user=users.get(Path(path), ("", ""))[0]
            )
        )
        for name, (path, format_) in order.images.items()
    }  # fmt: skip
    return {"runs": identity.runs(order.guest), "images": found}
