"""Images and dirty bitmaps that QEMU has let go: activate them, and make sure they can be reopened.

QEMU lets go of images, and of the bitmaps in them, when a migration ends. Without bitmaps the next
backup must read everything.

QEMU also lets go of a guest's images when its state is captured, and opens them anew before it
resumes. If it may not, the guest stays paused for good. That happens where QEMU is not root:
libvirt gives images back to their owner when a guest leaves a host, even if the guest runs on the
next host from there, unless it knows their file system as a shared one.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor, QmpRefused

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
    except QmpRefused:
        return
    monitor.tell("block-export-del", {"id": _EXPORT, "mode": "hard"})


_ON_HOST = {"file", "host_device"}
_HANDED = "/dev/fdset/"
"""libvirt gave QEMU an open file, which needs no name."""
# Says those that may not be read and written.
_TRY = 'for one in "$@"; do [ -r "$one" ] && [ -w "$one" ] || printf "%s\\0" "$one"; done'


def require_reopen(monitor: QmpMonitor) -> None:
    """Raises CannotCapture if its QEMU could not open an image again, and HypervisorError.

    Where that cannot be tried nothing is said.
    """
    process = identity.hold(monitor.guest)
    if process is None:
        return
    with process:
        closed = _closed(process.pid, writable(monitor.ask("query-named-block-nodes", flat=True)))
        user = _user(process.pid) if closed else 0
    if closed:
        place = f"{monitor.host}: " if monitor.host else ""
        raise CannotCapture(
            f"{place}{monitor.name} would stand still: its QEMU may not open {closed[0]} again,"
            " which is not its user's any more",
            hint=f"give it to QEMU's user there: chown {user} {closed[0]}",
        )


def writable(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What on the host its disks are written to, of what QEMU says (query-named-block-nodes)."""
    written = {str(one["file"]) for one in nodes if one["drv"] in _ON_HOST and not one["ro"]}
    return sorted(one for one in written if not one.startswith(_HANDED))


def as_it_runs(status: str) -> list[str] | None:
    """setpriv's words for the user and groups of a process (/proc/PID/status); None for root."""
    found = dict(re.findall(r"^(Uid|Gid|Groups):(.*)$", status, re.MULTILINE))
    user, group = found["Uid"].split()[1], found["Gid"].split()[1]  # the effective ones
    if user == "0":
        return None
    groups = ",".join(found["Groups"].split())
    more = ["--groups", groups] if groups else ["--clear-groups"]
    return ["--reuid", user, "--regid", group, *more]


def _user(process: int) -> int:
    return Path(f"/proc/{process}").stat().st_uid


def _closed(process: int, paths: Sequence[str]) -> list[str]:
    """Those that it may not read and write; none if that cannot be tried."""
    if not paths:
        return []
    try:
        words = as_it_runs(Path(f"/proc/{process}/status").read_text())
        if words is None:
            return []
        command = ["setpriv", *words, "sh", "-c", _TRY, "sh", *paths]
        if not _shares(process, "mnt"):  # other devices, say
            if not _shares(process, "user"):  # what is mounted there was not mounted by root
                return []
            command = ["nsenter", "--mount", "--target", str(process), "--", *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # it has ended, or there are no such programs
        return []
    return [path for path in done.stdout.split("\0") if path]


def _shares(process: int, namespace: str) -> bool:
    """Whether a process is in the same namespace of a kind as we are."""
    own, its = (Path(f"/proc/{one}/ns/{namespace}").stat() for one in ("self", process))
    return (own.st_dev, own.st_ino) == (its.st_dev, its.st_ino)
