"""The block job that copies a guest's writes to their log, before each write is answered.

The job and its nodes are found by name alone, so that another process can remove them later.
libvirt does not know of the job: a `virsh save` ends the guest, and the mirror with it.
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
"""How long to wait for a working job to become ready, and then to end, before it is forced to."""
_TURN = 0.005


class MirrorEnded(HypervisorError):
    """A disk's writes are no longer logged; the guest itself is not affected."""


Still = Callable[[bool], None]
"""Called with True right before the guest is paused, and with False when it runs again. If the
agent dies in between, the watchdog resumes the guest."""


def unnoticed(_: bool) -> None:
    """Do nothing: the `Still` for when no watchdog runs, as while a protection is removed."""


def name_of(disk: int) -> str:
    """Return the name of a disk's job, and of the node that it writes to."""
    return f"{MARK}{disk}"


def start_mirror(
    monitor: Commands, *, node: str, socket: Path, job: str, still: Still = unnoticed
) -> None:
    """Mirror what is written to a disk from now on into the log that `socket` serves.

    Does nothing if that job runs already. Raises HypervisorError, and leaves no job then; and
    ValueError if the job's name is too long.
    """
    if len(job) > _LONGEST_NAME:
        raise ValueError(f"{job} is too long for the name of a block node")
    if _why_over(_job(monitor, job)) is None:
        return
    end(monitor, job, still)
    target: dict[str, object] = {
        "driver": "nbd", "node-name": job, "server": {"type": "unix", "path": str(socket)},
        # Zeros must take no room in the log, and need not be copied byte by byte.
        "discard": "unmap", "detect-zeroes": "unmap",
    }  # fmt: skip
    monitor.tell("blockdev-add", target)
    order = {
        "job-id": job, "device": node, "target": job, "filter-node-name": _filter(job),
        "sync": "none", "copy-mode": "write-blocking",
        # Neither setting affects the guest. With "report", a write that is missing in the log shows
        # up to 100 ms later, when its epoch may be sealed already; with "stop" it shows at once.
        "on-target-error": "stop", "on-source-error": "stop", "auto-dismiss": False,
    }  # fmt: skip
    try:
        monitor.tell("blockdev-mirror", order)
    except HypervisorError:
        end(monitor, job, still)
        raise


def begun(monitor: Commands, job: str) -> bool:
    """Return whether the job has become ready; writes are logged before that, too.

    If it is called while the guest is paused and raises nothing, all earlier writes are in the log.
    Raises MirrorEnded if a write is not, or if the job has ended, and HypervisorError.
    """
    found = _job(monitor, job)
    why = _why_over(found)
    if found is None or why is not None:
        raise MirrorEnded(
            f"{monitor.name} on {monitor.host}: disk writes are no longer logged:"
            f" mirror {job} has ended: {why}",
            host=monitor.host,
        )
    return bool(found["ready"])


def end(monitor: Commands, job: str, still: Still = unnoticed) -> None:
    """Remove the mirror in whatever state it is; does nothing if there is none.

    The log must not make writes wait meanwhile. Raises HypervisorError.
    """
    began = time.monotonic()
    asked = False
    while (found := _job(monitor, job)) is not None:
        waited = time.monotonic() - began
        if waited > _PATIENCE:
            raise HypervisorError(
                f"{monitor.name} on {monitor.host}: the mirror {job} does not end"
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
    """Cancel a job that fails or never became ready, with the guest paused.

    QEMU (7.2, mirror.c) frees memory that writes in flight still use, which corrupts its heap.
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
    """Cancel a job. Without `force` a ready job waits for the writes in flight before it ends."""
    with suppress(QmpRefused):  # it may end by itself meanwhile
        monitor.tell("block-job-cancel", {"device": job, "force": force})


def _filter(job: str) -> str:
    return job + _TOP


def _why_over(found: dict[str, Any] | None) -> str | None:
    """Return why a job does not work any more; None: it works."""
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
