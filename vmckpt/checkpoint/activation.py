"""A guest that was migrated to us gets its disks back before it runs.

QEMU lets go of images when a migration ends, and of the bitmaps in them. Without these a backup
that begins then must read everything.
"""

from typing import Self

from vmckpt.checkpoint.settings import Commands
from vmckpt.hypervisor.qmp import Refused

_KNOWS = "blockdev-set-active"
_EXPORT = "vmckpt-activate"


class Activation:
    """Looked up while the guest still runs, carried out while it stands still."""

    def __init__(self, nodes: tuple[str, ...], *, knows: bool) -> None:
        """`nodes` are those of the disks that it can write to; `knows`: QEMU 10 or newer."""
        self._nodes, self._knows = nodes, knows

    @classmethod
    def of(cls, monitor: Commands) -> Self:
        """Raises HypervisorError."""
        knows = any(one["name"] == _KNOWS for one in monitor.ask("query-commands"))
        inserted = [one.get("inserted") for one in monitor.ask("query-block")]
        nodes = [str(one["node-name"]) for one in inserted if one and not one.get("ro")]
        return cls(tuple(nodes), knows=knows)

    def carry_out(self, monitor: Commands) -> None:
        """Raises HypervisorError."""
        if self._knows:
            monitor.tell(_KNOWS, {"active": True})
            return
        for node in self._nodes:
            _exported(monitor, node)


def _exported(monitor: Commands, node: str) -> None:
    """Older ones make an image ready for whoever exports it, before they look for a server: there
    is none, and nothing stays but the image that is ready."""
    try:
        wanted: dict[str, object] = {
            "type": "nbd",
            "id": _EXPORT,
            "node-name": node,
            "name": _EXPORT,
        }
        monitor.tell("block-export-add", wanted)
    except Refused:
        return
    monitor.tell("block-export-del", {"id": _EXPORT, "mode": "hard"})
