"""The guard beside an agent of a protection, which starts it again when it dies."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from vmckpt.hypervisor.qemu_process.held import HeldProcess
from vmckpt.replicate import guard
from vmckpt.replicate.facts import Session
from vmckpt.replicate.guard import Facts
from vmckpt.replicate.guarding import Rules
from vmckpt.replicate.guardpage import GuardPage, identity
from vmckpt.units import Seconds

_PATIENCE = 1.0


def command(folder: Path) -> tuple[str, ...]:
    """What starts the agent of a folder."""
    return (sys.executable, "-m", "vmckpt.agent.replica", str(folder))


def begin(session: Session, folder: Path, process: HeldProcess) -> GuardPage:
    """The guard's page, with us on it; and the guard of that QEMU. Raises GuardFailed."""
    path = folder / guard.PAGE
    lasts = Seconds(0.0)
    if session.role == "primary" and session.lease is not None:
        lasts = session.lease.terms.lasts
    with suppress(FileExistsError):
        GuardPage.create(path, lasts=lasts).close()
    page = GuardPage.open(path)
    page.agent = identity(os.getpid())
    patience = max(_PATIENCE, 2 * session.terms.max_pause)
    facts = Facts(
        page=str(path), qemu=identity(process.pid), command=command(folder), folder=str(folder),
        rules=Rules(patience=Seconds(patience)),
    )  # fmt: skip
    guard.begin(facts)
    return page
