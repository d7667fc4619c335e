"""Mirror a protected guest's disk writes to write logs, and read its disks for a full copy."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.disks import mirror_job, nbdkit_server, resync
from vmckpt.replication.disks.epoch_log import LogPlace, WriteLog
from vmckpt.replication.disks.log_control import Control
from vmckpt.replication.disks.mirror_job import MirrorEnded
from vmckpt.replication.disks.nbdkit_server import Socket
from vmckpt.replication.disks.resync import Readable
from vmckpt.replication.session import Session, memory_of
from vmckpt.units import MIB, Bytes

_LOG_LIMIT = Bytes(64 * MIB)


class Mirrors:
    """The mirror jobs and nbdkit servers that copy disk writes to the logs; see parts.Mirrors."""

    def __init__(
        self, session: Session, folder: Path, monitor: QmpMonitor, still: mirror_job.Still
    ) -> None:
        self._monitor, self._still = monitor, still
        nodes: Mapping[str, str] = session.extra["nodes"]
        self._disks = [
            (number, nodes[disk.target], Bytes(disk.size), *place_of(folder, number))
            for number, disk in enumerate(session.disks)
        ]
        self._owner = session.owner
        self._reading = resync.place_of(folder)

    def begin(self) -> bool:
        """Start the mirrors that are not running. Returns whether any mirror was missing.

        If so, and if there are several disks, restarts all mirrors, each with an empty log.
        Raises DiskLogError, HypervisorError, BadInput, OSError.
        """
        resync.end(self._monitor, self._reading)
        missing = False
        for number, node, size, place, path in self._disks:
            if not self._lives(number, place):
                missing = True
                self._begin(number, node, size, place, path)
        if missing and len(self._disks) > 1:
            self.begin_again()
        return missing

    def begin_again(self) -> None:
        """Restart all mirrors, each with an empty log. Raises the same errors as `begin`."""
        for number, node, size, place, path in self._disks:
            self._begin(number, node, size, place, path)

    def disks(self) -> AbstractContextManager[Sequence[Readable]]:
        """Open the guest's disks for reading; see resync.opened."""
        nodes = [node for _, node, *_ in self._disks]
        return resync.opened(self._monitor, nodes, self._reading, self._owner)

    def end(self) -> None:
        """Stop all mirrors. Raises HypervisorError."""
        for number, _, _, place, _ in self._disks:
            end(self._monitor, place, mirror_job.name_of(number), self._still)

    def logs(self) -> list[WriteLog]:
        """Open and return the write logs of all disks.

        From now on, a write waits while its log is full. Raises DiskLogError.
        """
        found = [WriteLog(place) for *_, place, _ in self._disks]
        for log in found:
            log.set_open(False)
        return found

    def _lives(self, number: int, place: LogPlace) -> bool:
        if nbdkit_server.running(place) is None:
            return False
        try:
            mirror_job.begun(self._monitor, mirror_job.name_of(number))
        except MirrorEnded:
            return False
        with WriteLog(place) as log:
            return log.failed() is None

    def _begin(self, number: int, node: str, size: Bytes, place: LogPlace, path: Path) -> None:
        job = mirror_job.name_of(number)
        socket = Socket(path=path, owner=self._owner)
        end(self._monitor, place, job, self._still)
        if nbdkit_server.running(place) is not None:
            with WriteLog(place) as log:
                spoiled = log.failed()
                log.consume(log.size())
                log.set_open(False)  # stopping the previous mirror has opened it
            if spoiled is not None:
                nbdkit_server.stop(place, socket)
        nbdkit_server.start(place, socket, size=size, limit=_LOG_LIMIT)
        mirror_job.start_mirror(self._monitor, node=node, socket=path, job=job, still=self._still)


def place_of(folder: Path, disk: int) -> tuple[LogPlace, Path]:
    """Return the place of a disk's write log, and the path of the socket that QEMU writes to.

    Raises RemoteError, OSError.
    """
    return LogPlace(folder=memory_of(folder) / "writes", disk=disk), folder / "nbd" / f"{disk}.sock"


def end(
    monitor: QmpMonitor, place: LogPlace, job: str, still: mirror_job.Still = mirror_job.unnoticed
) -> None:
    """Stop a disk's mirror job, so that the guest's writes no longer wait for it.

    `still`: see mirror_job.Still. Raises HypervisorError.
    """
    with suppress(OSError, ValueError), Control(place.control) as told:
        # Otherwise the job could not stop: it would wait for writes that are waiting for the log.
        told.never_wait = True
    mirror_job.end(monitor, job, still)


def end_all(session: Session, folder: Path, monitor: QmpMonitor | None) -> None:
    """Stop all mirrors and nbdkit servers of a session.

    `monitor`: None if the guest's QEMU is gone. Raises VmckptError, OSError.
    """
    if monitor is not None:
        resync.end(monitor, resync.place_of(folder))
    for number in range(len(session.disks)):
        place, path = place_of(folder, number)
        if monitor is not None:
            end(monitor, place, mirror_job.name_of(number))
        nbdkit_server.stop(place, Socket(path=path))
