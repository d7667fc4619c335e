"""The block job that brings a guest's writes to its log: each is in both before it is answered.

All of it is found again by name alone, so that it can be taken away by somebody else later.
libvirt knows nothing of it: a `virsh save` ends the guest, and the mirror with it.
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
"""How our jobs' names begin."""
_TOP = "-top"
_LONGEST_NAME = 31 - len(_TOP)
_PATIENCE = Seconds(10.0)
_GENTLY = Seconds(2.0)
"""So long one that works is waited for, until it is ready and then until it has ended."""
_TURN = 0.005


class MirrorEnded(HypervisorError):
    """A disk's writes do not come to its log any more; the guest itself is unharmed."""


Still = Callable[[bool], None]
"""Called with True right before the guest is stopped, with False when it runs again: if we die in
between, the watchdog resumes it."""


def unnoticed(_: bool) -> None:
    """Where no watchdog looks, as while a protection is taken away."""


def name_of(disk: int) -> str:
    """The name of the job, and of the node that it writes to, for one of the guest's disks."""
    return f"{MARK}{disk}"


def start_mirror(
    monitor: Commands, *, node: str, socket: Path, job: str, still: Still = unnoticed
) -> None:
    """Mirror what is written to a disk from now on into the log served at `socket`.

    Fine if that job is there already. Raises HypervisorError; nothing is left then.
    """
    if len(job) > _LONGEST_NAME:
        raise ValueError(f"{job} is too long for the name of a node")
    if _why_over(_job(monitor, job)) is None:
        return
    end(monitor, job, still)
    target: dict[str, object] = {
        "driver": "nbd", "node-name": job, "server": {"type": "unix", "path": str(socket)},
        # Zeros shall take no room in the log, nor need to be copied one by one.
        "discard": "unmap", "detect-zeroes": "unmap",
    }  # fmt: skip
    monitor.tell("blockdev-add", target)
    order = {
        "job-id": job, "device": node, "target": job, "filter-node-name": _filter(job),
        "sync": "none", "copy-mode": "write-blocking",
        # Neither harms the guest. With "report" a write that did not come to the log is to be seen
        # up to 100 ms later only, when its epoch may be sealed; with "stop" at once.
        "on-target-error": "stop", "on-source-error": "stop", "auto-dismiss": False,
    }  # fmt: skip
    try:
        monitor.tell("blockdev-mirror", order)
    except HypervisorError:
        end(monitor, job, still)
        raise


def begun(monitor: Commands, job: str) -> bool:
    """Whether the job has really begun; what is written comes to the log before that, too.

    Asked after `stop` it says that all until then came to the log: it raises MirrorEnded if
    something did not, or the job is gone. Raises HypervisorError.
    """
    found = _job(monitor, job)
    why = _why_over(found)
    if found is None or why is not None:
        raise MirrorEnded(
            f"{monitor.name} on {monitor.host}: writes do not come to the log any more,"
            f" the mirror {job} has ended: {why}",
            host=monitor.host,
        )
    return bool(found["ready"])


def end(monitor: Commands, job: str, still: Still = unnoticed) -> None:
    """Take the mirror away, as it is; fine if there is none, or half of one.

    The log must not hold writes back meanwhile. Raises HypervisorError.
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
    """Of one that fails, or never was ready. The guest stands still for it: QEMU (7.2, mirror.c)
    frees what writes that are under way then still write to, and its heap is damaged."""
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
    """Without force one that is ready waits for the writes that are under way, before it ends."""
    with suppress(QmpRefused):  # it may end by itself meanwhile
        monitor.tell("block-job-cancel", {"device": job, "force": force})


def _filter(job: str) -> str:
    return job + _TOP


def _why_over(found: dict[str, Any] | None) -> str | None:
    """Why a job is of no use any more; None: it works."""
    if found is None:
        return "somebody took it away"
    if found["io-status"] != "ok":
        return "no space" if found["io-status"] == "nospace" else "an input/output error"
    if found["status"] in ("aborting", "concluded", "null"):
        return str(found.get("error", "it was cancelled"))
    return None


def _job(monitor: Commands, job: str) -> dict[str, Any] | None:
    found = monitor.ask("query-block-jobs")
    return next((one for one in found if one["device"] == job), None)


def _nodes(monitor: Commands) -> list[dict[str, Any]]:
    return list(monitor.ask("query-named-block-nodes", flat=True))
