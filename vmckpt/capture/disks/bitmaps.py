"""Activate images and dirty bitmaps that QEMU has inactivated; check that QEMU can reopen images.

QEMU inactivates images, and the bitmaps in them, when a migration ends. Without bitmaps, the next
backup must read all data.

QEMU also inactivates a guest's images when the guest's state is captured, and reopens the images
before the guest resumes. If QEMU lacks permission, the guest stays paused forever. This can happen
if QEMU does not run as root: when a guest leaves a host, libvirt restores the original owner of its
images, even if the guest uses them on its new host. libvirt leaves the owner unchanged only if it
knows that the file system is shared.
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
    """Activates images. Create it with `of` before the pause; call `carry_out` during the pause."""

    def __init__(self, nodes: tuple[str, ...], *, knows: bool) -> None:
        """`nodes`: block nodes of the writable disks; `knows`: whether QEMU is 10.0 or newer."""
        self._nodes, self._knows = nodes, knows

    @classmethod
    def of(cls, monitor: Commands) -> Self:
        """Query QEMU for the facts that activation needs. Raises HypervisorError."""
        knows = any(one["name"] == _KNOWS for one in monitor.ask("query-commands"))
        inserted = [one.get("inserted") for one in monitor.ask("query-block")]
        nodes = [str(one["node-name"]) for one in inserted if one and not one.get("ro")]
        return cls(tuple(nodes), knows=knows)

    def carry_out(self, monitor: Commands) -> None:
        """Activate the images. Raises HypervisorError."""
        if self._knows:
            monitor.tell(_KNOWS, {"active": True})
            return
        for node in self._nodes:
            _exported(monitor, node)


def _exported(monitor: Commands, node: str) -> None:
    """Activate an image in a QEMU older than 10.0, by trying to export it.

    QEMU activates the image before it looks for an NBD server. As no NBD server exists, the export
    fails and only the activation remains.
    """
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
"""Prefix of a file that libvirt has opened for QEMU, so that QEMU need not open it by name."""
# Prints the files that are not both readable and writable.
_TRY = 'for one in "$@"; do [ -r "$one" ] && [ -w "$one" ] || printf "%s\\0" "$one"; done'


def require_reopen(monitor: QmpMonitor) -> None:
    """Check that the guest's QEMU can reopen its images. Does nothing if the test is not possible.

    Raises CannotCapture if QEMU could not reopen an image, HypervisorError, OSError.
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
            f"{place}{monitor.name} is not paused, because it could not be resumed afterwards: its"
            f" QEMU has no permission to reopen {closed[0]}",
            hint=f"make QEMU's user on that host the owner: chown {user} {closed[0]}",
        )


def writable(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the host files and devices to which QEMU writes, from `query-named-block-nodes`."""
    written = {str(one["file"]) for one in nodes if one["drv"] in _ON_HOST and not one["ro"]}
    return sorted(one for one in written if not one.startswith(_HANDED))


def as_it_runs(status: str) -> list[str] | None:
    """Return the arguments of setpriv for a process's user and groups; None for root.

    `status`: the process's /proc/PID/status.
    """
    found = dict(re.findall(r"^(Uid|Gid|Groups):(.*)$", status, re.MULTILINE))
    user, group = found["Uid"].split()[1], found["Gid"].split()[1]  # the effective IDs
    if user == "0":
        return None
    groups = ",".join(found["Groups"].split())
    more = ["--groups", groups] if groups else ["--clear-groups"]
    return ["--reuid", user, "--regid", group, *more]


def _user(process: int) -> int:
    return Path(f"/proc/{process}").stat().st_uid


def _closed(process: int, paths: Sequence[str]) -> list[str]:
    """Return the paths that a process cannot both read and write.

    Returns an empty list if the process runs as root, or if the test is not possible.
    """
    if not paths:
        return []
    try:
        words = as_it_runs(Path(f"/proc/{process}/status").read_text())
        if words is None:
            return []
        command = ["setpriv", *words, "sh", "-c", _TRY, "sh", *paths]
        if not _shares(process, "mnt"):  # the process may see other devices
            if not _shares(process, "user"):  # a user other than root may have made its mounts
                return []
            command = ["nsenter", "--mount", "--target", str(process), "--", *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # the process has ended, or the tools are missing
        return []
    return [path for path in done.stdout.split("\0") if path]


def _shares(process: int, namespace: str) -> bool:
    """Return whether another process shares a namespace, such as "mnt", with this process."""
    own, its = (Path(f"/proc/{one}/ns/{namespace}").stat() for one in ("self", process))
    return (own.st_dev, own.st_ino) == (its.st_dev, its.st_ino)
