"""Start the watchdog of a protection's agent, which restarts the agent when it dies."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from vmckpt.agent.replication import handover, mirrors
from vmckpt.hypervisor.qemu_process import lease_timer
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.replication.session import Session
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog import rules, systemd_unit
from vmckpt.replication.watchdog.facts import Facts, Resumable
from vmckpt.replication.watchdog.rules import KillMethod, Rules
from vmckpt.replication.watchdog.shared_page import WatchdogPage, identity
from vmckpt.units import Seconds

_PATIENCE = 1.0


def agent_command(folder: Path) -> tuple[str, ...]:
    """Return the command that starts the agent of the protection in `folder`."""
    return (sys.executable, "-P", "-m", "vmckpt.agent.replication.main", str(folder))


def kill_method(session: Session, process: HeldProcess) -> tuple[KillMethod | None, str | None]:
    """Return how the guest's lease is enforced on this host, and why the kernel cannot enforce it.

    Both are None without a lease; the reason is None if the kernel can enforce the lease. To check
    whether QEMU's main thread can be traced, this function stops the thread briefly.
    """
    if session.lease is None:
        return None, None
    why = lease_timer.why_not(process)
    return rules.kill_method(timer=why is None, systemd=systemd_unit.available()), why


def start_watchdog(
    session: Session, folder: Path, process: HeldProcess, kept_by: KillMethod | None = None
) -> WatchdogPage:
    """Start the watchdog of a QEMU process and of the calling process, the agent.

    `kept_by`: the method that enforces the lease, from `kill_method`; None: no lease to enforce.
    Returns the page shared with the watchdog. Raises WatchdogFailed, RemoteError, OSError.
    """
    path = folder / watchdog_process.PAGE
    lasts = Seconds(0.0)
    if session.role == "primary" and session.lease is not None:
        lasts = session.lease.terms.lasts
    with suppress(FileExistsError):
        WatchdogPage.create(path, lasts=lasts).close()
    page = WatchdogPage.open(path)
    page.agent = identity(os.getpid())
    patience = max(_PATIENCE, 2 * session.terms.max_pause)
    facts = Facts(
        page=str(path), qemu=identity(process.pid), command=agent_command(folder),
        folder=str(folder), rules=Rules(patience=Seconds(patience)),
        resumable=_resumable(session, folder), pair=kept_by is KillMethod.PAIR,
    )  # fmt: skip
    watchdog_process.start(facts, unit=kept_by is KillMethod.UNIT)
    return page


def _resumable(session: Session, folder: Path) -> Resumable | None:
    if session.role != "primary":
        return None
    disks = range(len(session.disks))
    return Resumable(
        guest=session.guest, host=session.host, uri=session.uri, undo=session.undo,
        lock=str(folder / handover.AGENT_LOCK),
        logs=tuple(str(mirrors.place_of(folder, number)[0].control) for number in disks),
    )  # fmt: skip
