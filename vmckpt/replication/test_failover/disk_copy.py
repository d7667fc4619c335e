"""Serve the standby's disks as of one instant, while later epochs are written to them.

Before QEMU overwrites data, it copies the data to an overlay image whose backing file is the disk.
QEMU serves the overlay over the socket that the agent also uses for writing. Jobs, exports and
nodes are found by name only.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.units import Seconds

MARK = "vmckpt-test-"
"""Prefix of the IDs of a test's jobs and exports, and of the names of its nodes."""
_TOP = "-top"
_PATIENCE = Seconds(10.0)
_TURN = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleece:
    """A point-in-time copy of one disk, as an overlay image (QEMU's image fleecing)."""

    number: int
    export: str
    """Name of the NBD export."""
    node: str
    """QEMU's node name of the standby's disk."""
    image: str
    """Path of an empty qcow2 image of the same size, for data that would be overwritten."""

    @property
    def name(self) -> str:
        """Name of the job and of the overlay's node, and ID of the export."""
        return f"{MARK}{self.number}"


def prepare(monitor: Commands, fleeces: Sequence[Fleece]) -> None:
    """Serve the disks. Until `start_copies`, reads return the disks' current content.

    Raises HypervisorError.
    """
    for one in fleeces:
        file = {"driver": "file", "filename": one.image}
        node: dict[str, object] = {"driver": "qcow2", "node-name": one.name, "file": file}
        monitor.tell("blockdev-add", node | {"backing": one.node, "discard": "unmap"})
        # The export also activates the node, so that it is writable: in a waiting QEMU, nodes are
        # inactive.
        told: dict[str, object] = {"type": "nbd", "id": one.name, "name": one.export}
        monitor.tell("block-export-add", told | {"node-name": one.name, "writable": False})


def start_copies(monitor: Commands, fleeces: Sequence[Fleece]) -> None:
    """Preserve the current content of all disks for readers. Raises HypervisorError."""
    if not fleeces:
        return
    actions = [
        {
            "type": "blockdev-backup",
            "data": {
                "job-id": one.name, "device": one.node, "target": one.name, "sync": "none",
                "filter-node-name": one.name + _TOP,
            },
        }
        for one in fleeces
    ]  # fmt: skip
    monitor.tell("transaction", {"actions": actions})


def end(monitor: Commands) -> bool:
    """Remove all jobs, exports and nodes of a test. Returns whether any existed.

    May be repeated. Raises HypervisorError.
    """
    give_up = time.monotonic() + _PATIENCE
    found = False
    while jobs := _ours(monitor.ask("query-block-jobs"), "device"):
        found = True
        for job in jobs:
            with suppress(QmpRefused):  # the job is already ending by itself
                monitor.tell("block-job-cancel", {"device": job, "force": True})
        _wait(monitor, give_up)
    while exports := _ours(monitor.ask("query-block-exports"), "id"):
        found = True
        for export in exports:
            with suppress(QmpRefused):  # the export is already being removed
                monitor.tell("block-export-del", {"id": export, "mode": "hard"})
        _wait(monitor, give_up)
    for node in _ours(monitor.ask("query-named-block-nodes", flat=True), "node-name"):
        found = True
        monitor.tell("blockdev-del", {"node-name": node})
    return found


def _ours(told: Sequence[dict[str, Any]], key: str) -> list[str]:
    return [str(one[key]) for one in told if str(one.get(key, "")).startswith(MARK)]


def _wait(monitor: Commands, give_up: float) -> None:
    if time.monotonic() > give_up:
        raise HypervisorError(
            f"{monitor.name} on {monitor.host}: disk jobs or exports of a failover test did not"
            " stop",
            host=monitor.host,
        )
    time.sleep(_TURN)
