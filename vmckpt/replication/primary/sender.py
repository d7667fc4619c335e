"""Send an epoch as differences from the backup's data, in messages of limited size."""

import time
from collections.abc import Sequence

import zstandard

from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.memory import ProtectedMemory
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import DeviceState, EpochEnd, Part, Tally, Writes
from vmckpt.replication.protocol.messages import Pages as PagesMessage
from vmckpt.units import BytesPerSecond

_LEVEL = 1


class Sender:
    """Sends epochs over one connection. Reports to `memory` what was sent."""

    def __init__(
        self, line: PeerConnection, memory: ProtectedMemory, logs: Sequence[WriteLog],
        bandwidth: BytesPerSecond | None = None,
    ) -> None:  # fmt: skip
        self._line, self._memory, self._logs = line, memory, logs
        self.bandwidth = bandwidth
        """Maximum send rate; None: no limit."""
        self._free = 0.0
        """When the next part may be sent."""
        self._packer = zstandard.ZstdCompressor(level=_LEVEL)
        self._tally = Tally()

    def memory(self, number: int, changed: Sequence[Changed]) -> None:
        """Send changed pages, and pages that the backup lacks, as parts of epoch `number`.

        Raises ConnectionLost.
        """
        for block, one in enumerate(changed):
            for numbers, new, old in self._memory.pieces(block, one):
                data = page_codec.encode(numbers, new, old, level=_LEVEL)
                self._part(PagesMessage(epoch=number, file=block, data=data))
                self._memory.sent(block, numbers, new)

    def writes(self, number: int, begins: Sequence[int], ends: Sequence[int]) -> None:
        """Send disk writes: each log from its offset in `begins` to its offset in `ends`.

        Raises ConnectionLost, DiskLogError.
        """
        for disk, (log, begin, end) in enumerate(zip(self._logs, begins, ends, strict=True)):
            for records in log.read(begin, end):
                data = self._packer.compress(records)
                self._part(Writes(epoch=number, disk=disk, data=data))

    def bulk(self, disk: int, records: bytes) -> None:
        """Send records of a disk that are not from its log and do not belong to an epoch.

        Raises ConnectionLost.
        """
        self._part(Writes(epoch=0, disk=disk, data=self._packer.compress(records)))

    def finish(
        self, number: int, epoch: Epoch, previous: bytes | None, *, base: int, final: bool,
        taken: float,
    ) -> None:  # fmt: skip
        """Send the device state, as a difference from `previous`, and the end of the epoch.

        `previous`: the state that the backup has; None: unknown. `base`: the last acknowledged
        epoch. `final`, `taken`: see EpochEnd. Raises ConnectionLost, and ValueError for a device
        state above `page_codec.MOST_STATE`.
        """
        self._part(DeviceState(epoch=number, data=page_codec.encode_state(epoch.state, previous)))
        seal = EpochEnd(
            epoch=number, base=base, messages=self._tally.count, digest=self._tally.digest(),
            final=final, taken=taken,
        )  # fmt: skip
        self._tally = Tally()
        self._line.send(seal)

    def _part(self, part: Part) -> None:
        if part.epoch:
            self._tally.add(part)
        before = self._line.sent
        self._line.send(part)
        if self.bandwidth is not None:
            now = time.monotonic()
            self._free = max(self._free, now) + (self._line.sent - before) / self.bandwidth
            time.sleep(max(0.0, self._free - now))
