"""How a protection's epochs are captured on this host: chosen once in an agent's life."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vmckpt.checkpoint.guestmemory import MemoryFile
from vmckpt.checkpoint.settings import Undo
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.replicate import bydirtylog, choosing
from vmckpt.replicate.buffers import Buffers
from vmckpt.replicate.bydirtylog import ByDirtyLog, Gate
from vmckpt.replicate.capture import Capturer
from vmckpt.replicate.choosing import Choice, Finder
from vmckpt.replicate.dirtylog import DirtyLog
from vmckpt.replicate.diskepochs import WriteLog
from vmckpt.replicate.facts import Session
from vmckpt.replicate.finder import CompareFinder
from vmckpt.replicate.memory import Memory
from vmckpt.replicate.parts import Captures
from vmckpt.units import MIB

ASIDE = 64 * MIB >> 12
"""Pages of an epoch that are kept to send differences of."""


def choose(session: Session, folder: Path, monitor: Monitor, process: int) -> Choice:
    """Which way it is; a try on a scratch guest may take half a minute, once for each QEMU.

    Raises HypervisorError, OSError.
    """
    if (why := bydirtylog.failed(folder)) is not None:
        return Choice(finder=Finder.COMPARE, why=f"QEMU's dirty log failed with this guest: {why}")
    known = Path(session.state).parent
    known.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = str(Path(f"/proc/{process}/exe").readlink()).removesuffix(" (deleted)")
    return choosing.choose(
        known, qemu=monitor.qemu_version(),
        accelerator="kvm" if monitor.ask("query-kvm")["enabled"] else "TCG",
        # libvirt knows nothing of our mirrors, and saves or migrates the guest all the same.
        guarded=False, trying=lambda: choosing.tryout(qemu=program),
    )  # fmt: skip


def capturer(
    choice: Choice, folder: Path, monitor: Monitor, undo: Undo, *, files: Sequence[MemoryFile],
    memory: Memory, finder: CompareFinder, output: Buffers, logs: Sequence[WriteLog],
    still: Callable[[bool], None],
) -> Captures:  # fmt: skip
    """What takes epochs that way."""
    compare = Capturer(monitor, undo, finder=finder, output=output, logs=logs, still=still)
    if choice.finder is Finder.COMPARE:
        return compare
    gate = Gate(output)

    def make() -> DirtyLog:
        return DirtyLog(
            monitor, undo, files=files, last=memory.last, most=ASIDE, output=gate, logs=logs,
            still=still,
        )  # fmt: skip

    return ByDirtyLog(monitor, folder, make, compare=compare, gate=gate)
