"""The standby's disks as they were at one instant, to be read while later epochs are written.

QEMU copies what is about to be overwritten into an image of ours, whose backing is the disk itself,
and serves that image over the socket through which we write. All is found again by name alone.
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
"""How names of our jobs, exports and nodes begin."""
_TOP = "-top"
_PATIENCE = Seconds(10.0)
_TURN = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleece:
    """One disk."""

    number: int
    export: str
    """The name under which it is served."""
    node: str
    """QEMU's, of the standby's disk."""
    image: str
    """An empty qcow2 image of the same size, for what is overwritten."""

    @property
    def name(self) -> str:
        """Of its job, its export's id and its node."""
        return f"{MARK}{self.number}"


def prepare(monitor: Commands, fleeces: Sequence[Fleece]) -> None:
    """Serve the disks as they are when read, until `start_copies`. Raises HypervisorError."""
    for one in fleeces:
        file = {"driver": "file", "filename": one.image}
        node: dict[str, object] = {"driver": "qcow2", "node-name": one.name, "file": file}
        monitor.tell("blockdev-add", node | {"backing": one.node, "discard": "unmap"})
        # Not before it is served may it be written: a node of a QEMU that waits is inactive.
        told: dict[str, object] = {"type": "nbd", "id": one.name, "name": one.export}
        monitor.tell("block-export-add", told | {"node-name": one.name, "writable": False})


def start_copies(monitor: Commands, fleeces: Sequence[Fleece]) -> None:
    """From now on what is read is what the disks are now, all of them. Raises HypervisorError."""
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
    """See that nothing of it is left; whether there was anything. May be repeated.

    Raises HypervisorError.
    """
    give_up = time.monotonic() + _PATIENCE
    found = False
    while jobs := _ours(monitor.ask("query-block-jobs"), "device"):
        found = True
        for job in jobs:
            with suppress(QmpRefused):  # it ends by itself just now
                monitor.tell("block-job-cancel", {"device": job, "force": True})
        _wait(monitor, give_up)
    while exports := _ours(monitor.ask("query-block-exports"), "id"):
        found = True
        for export in exports:
            with suppress(QmpRefused):  # it is on its way out
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
            f"{monitor.name} on {monitor.host}: what a test set on its disks does not end",
            host=monitor.host,
        )
    time.sleep(_TURN)
