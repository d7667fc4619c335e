"""Copy disks and memory of the running guest to a standby that has no epoch yet, until an epoch can
carry the rest."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vmckpt.capture.migration_settings import Commands
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.disks import mirror_job, resync
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.disks.resync import Readable
from vmckpt.replication.primary.memory import Pause, ProtectedMemory
from vmckpt.replication.primary.sender import Sender
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import MIB, Seconds

_FEW = 16 * MIB >> 12
"""Once the mirrors are ready, the copy ends when fewer pages than this remain."""
_PASSES = 8
_TURN = Seconds(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCopy:
    """The first copy of a guest.

    `pause`: see `Capturer.pause`; `disks`: see `ProtectedGuest.disks`. For the other attributes,
    see `parts.Parts`.
    """

    monitor: Commands
    memory: ProtectedMemory
    pause: Pause
    logs: Sequence[WriteLog]
    disks: Callable[[], AbstractContextManager[Sequence[Readable]]]
    requests: Requests
    status: PrimaryStatus

    def run(self, line: PeerConnection, sender: Sender, left: int) -> None:
        """Copy the data that the backup lacks. Returns early if the protection is to end.

        `left`: number of pages that the backup lacks. The mirrors must be running. Raises
        ConnectionLost, WireError, DiskLogError, and any error of the memory, disks or mirrors.
        """
        self.status.copied(left, ready=False)
        # Disks usually take longer, and memory that is sent first would be outdated by the end.
        self._disks(line, sender)
        self.memory_passes(sender, left)

    def memory_passes(self, sender: Sender, left: int) -> None:
        """Copy memory that the backup lacks.

        Returns when the mirrors are ready and little is left, or after several passes; earlier if
        the protection is to end. Arguments and errors: see `run`.
        """
        passes, ready = 0, False
        while not self._ends and not (ready and (left < _FEW or passes > _PASSES)):
            self._drain(sender)
            changed = self.memory.changes(self.pause)
            left = sum(one.count for one in changed)
            sender.memory(0, changed)
            passes += 1
            ready = self._mirrors_ready()
            self.status.copied(left, ready=ready)
            if left < _FEW:
                self.requests.wait(_TURN)

    @property
    def _ends(self) -> bool:
        return self.requests.has(Request.END)

    def _disks(self, line: PeerConnection, sender: Sender) -> None:
        if not self.logs:
            return
        with self.disks() as disks:
            for progress in resync.bring(line, sender, disks):
                self._drain(sender)
                self.status.compared(progress)
                if self._ends:
                    return

    def _drain(self, sender: Sender) -> None:
        begins, ends = [log.consumed for log in self.logs], [log.size() for log in self.logs]
        sender.writes(0, begins, ends)
        for log, end in zip(self.logs, ends, strict=True):
            log.consume(end)

    def _mirrors_ready(self) -> bool:
        names = [mirror_job.name_of(number) for number in range(len(self.logs))]
        return all(mirror_job.begun(self.monitor, name) for name in names)
