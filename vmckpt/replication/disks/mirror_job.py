"""The block job that copies each write of a guest to the disk's log before the write is answered.

The job and its nodes are found by name only, so that another process can remove them later. libvirt
does not know about the job: `virsh save` stops the guest, and with it the mirror.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.units import Seconds

MARK = "vmckpt-mirror-"
"""Prefix of the names of vmckpt's mirror jobs."""
_TOP = "-top"
_LONGEST_NAME = 31 - len(_TOP)
_PATIENCE = Seconds(10.0)
_GENTLY = Seconds(2.0)
"""How long to wait for a working job to become ready and then end, before it is forced to end."""
_TURN = 0.005


class MirrorEnded(HypervisorError):
    """A disk's writes are no longer logged; the guest itself is not affected."""


Still = Callable[[bool], None]
"""Called with True right before the guest is paused, and with False once it is running again. If
the agent dies in between, the watchdog resumes the guest."""


def unnoticed(_: bool) -> None:
    """Do nothing: a `Still` to use while no watchdog is running, as when removing a protection."""


def name_of(disk: int) -> str:
    """Return the name of a disk's mirror job; the node to which it writes has the same name."""
    return f"{MARK}{disk}"


def start_mirror(
    monitor: Commands, *, node: str, socket: Path, job: str, still: Still = unnoticed
) -> None:
    """Mirror all further writes to a disk into the log that is served on `socket`.

    `node`: QEMU's node name of the disk. Does nothing if the job is already running. Raises
    HypervisorError; a job that fails to start is removed. Raises ValueError if the job's name is
    too long.
    """
    if len(job) > _LONGEST_NAME:
        raise ValueError(f"{job} is too long for the name of a block node")
    if _why_over(_job(monitor, job)) is None:
        return
    end(monitor, job, still)
    target: dict[str, object] = {
        "driver": "nbd", "node-name": job, "server": {"type": "unix", "path": str(socket)},
        # Zeros must take no space in the log, and need not be copied byte by byte.
        "discard": "unmap", "detect-zeroes": "unmap",
    }  # fmt: skip
    monitor.tell("blockdev-add", target)
    order = {
        "job-id": job, "device": node, "target": job, "filter-node-name": _filter(job),
        "sync": "none", "copy-mode": "write-blocking",
        # Neither setting affects the guest. With "report", a write that is missing in the log is
        # detected up to 100 ms later, when its epoch may already be sealed; with "stop", it is
        # detected immediately.
        "on-target-error": "stop", "on-source-error": "stop", "auto-dismiss": False,
    }  # fmt: skip
    try:
        monitor.tell("blockdev-mirror", order)
    except HypervisorError:
        end(monitor, job, still)
        raise


def begun(monitor: Commands, job: str) -> bool:
    """Return whether the job has become ready. Writes are also logged before that.

    If this is called while the guest is paused and raises no error, all earlier writes are in the
    log. Raises MirrorEnded if a write is missing or the job has ended; HypervisorError.
    """
    found = _job(monitor, job)
    why = _why_over(found)
    if found is None or why is not None:
        raise MirrorEnded(
            f"{monitor.name} on {monitor.host}: disk writes are no longer logged:"
            f" mirror {job} no longer works: {why}",
            host=monitor.host,
        )
    return bool(found["ready"])


def end(monitor: Commands, job: str, still: Still = unnoticed) -> None:
    """Remove the mirror, whatever its state; does nothing if there is no mirror.

    The log must not make writes wait meanwhile. Raises HypervisorError.
    """
    began = time.monotonic()
    asked = False
    while (found := _job(monitor, job)) is not None:
        waited = time.monotonic() - began
        if waited > _PATIENCE:
            raise HypervisorError(
                f"{monitor.name} on {monitor.host}: the mirror {job} does not stop"
                f" ({found['status']})",
                host=monitor.host,
            )
        if found["status"] == "concluded":
            with suppress(QmpRefused):
                monitor.tell("job-dismiss", {"id": job})
        elif found["status"] not in ("aborting", "pending", "null"):
            if waited > _GENTLY or _why_over(found) is not None:
                _break_off(monitor, job, still)
            elif found["ready"] and not asked:
                asked = True
                _cancel(monitor, job, force=False)
        time.sleep(_TURN)
    if any(node["node-name"] == job for node in _nodes(monitor)):
        monitor.tell("blockdev-del", {"node-name": job})


def _break_off(monitor: Commands, job: str, still: Still) -> None:
    """Cancel a job that fails or never became ready, while the guest is paused.

    Otherwise QEMU (7.2, mirror.c) frees memory that writes in flight still use, which corrupts its
    heap.
    """
    runs = monitor.run_state() == "running"
    if runs:
        still(True)
        monitor.tell("stop", {})
    try:
        _cancel(monitor, job, force=True)
    finally:
        if runs:
            monitor.tell("cont", {})
            still(False)


def _cancel(monitor: Commands, job: str, *, force: bool) -> None:
    """Cancel a job. Without `force`, a ready job first waits for the writes in flight."""
    with suppress(QmpRefused):  # the job may end by itself meanwhile
        monitor.tell("block-job-cancel", {"device": job, "force": force})


def _filter(job: str) -> str:
    return job + _TOP


def _why_over(found: dict[str, Any] | None) -> str | None:
    """Return why a job no longer works; None: it works."""
    if found is None:
        return "it was removed"
    if found["io-status"] != "ok":
        return "no space left" if found["io-status"] == "nospace" else "an input/output error"
    if found["status"] in ("aborting", "concluded", "null"):
        return str(found.get("error", "it was cancelled"))
    return None


def _job(monitor: Commands, job: str) -> dict[str, Any] | None:
    found = monitor.ask("query-block-jobs")
    return next((one for one in found if one["device"] == job), None)


def _nodes(monitor: Commands) -> list[dict[str, Any]]:
    return list(monitor.ask("query-named-block-nodes", flat=True))
