"""Send an epoch as differences from the backup's data, in messages of limited size."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import zstandard

from vmckpt.capture.memory.page_diff import Flags, Mapping, Numbers
from vmckpt.replication.dirty_pages.finder import Changed, Pages
from vmckpt.replication.disks.epoch_log import WriteLog
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import DeviceState, EpochEnd, Part, Tally, Writes
from vmckpt.replication.protocol.messages import Pages as PagesMessage
from vmckpt.units import BytesPerSecond

_MOST_PAGES = 2048
"""Maximum number of pages in one message: 8 MiB before compression."""
_LEVEL = 1


class Sender:
    """Sends epochs over one connection.

    `last`: the last copy of each memory file; `stale`: for each file, the pages whose content on
    the backup is unknown, which are sent in full. Sending updates both.
    """

    def __init__(
        self, line: PeerConnection, last: Sequence[Mapping], logs: Sequence[WriteLog],
        stale: Sequence[Flags], bandwidth: BytesPerSecond | None = None,
    ) -> None:  # fmt: skip
        self._line, self._last, self._logs, self._stale = line, last, logs, stale
        self.bandwidth = bandwidth
        """Maximum send rate; None: no limit."""
        self._free = 0.0
        """When the next part may be sent."""
        self._packer = zstandard.ZstdCompressor(level=_LEVEL)
        self._tally = Tally()

    def memory(self, number: int, changed: Sequence[Changed]) -> None:
        """Send changed pages, and apply them to the last copies. Raises ConnectionLost."""
        together = zip(self._last, changed, self._stale, strict=True)
        for file, (last, one, stale) in enumerate(together):
            for numbers, new, old in _pieces(last, one, stale):
                data = page_codec.encode(numbers, new, old, level=_LEVEL)
                self._part(PagesMessage(epoch=number, file=file, data=data))
                last.pages[numbers] = new
                last.written[numbers] = True
                stale[numbers] = False

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
        """Send the device state, as a difference from the previous one, and the end of the epoch.

        `previous`: the state that the backup has; None: unknown. `base`: the last acknowledged
        epoch. `taken`: when the epoch was captured, by time.time(). Raises ConnectionLost.
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


def _pieces(
    last: Mapping, one: Changed, stale: Flags
) -> Iterator[tuple[Numbers, Pages, Pages | None]]:
    """Yield page numbers, the pages' new content, and the backup's content, or None if unknown."""
    unknown = stale[one.numbers]
    for piece in _cut(np.flatnonzero(~unknown)):
        numbers = one.numbers[piece]
        yield numbers, one.pages[piece], last.pages[numbers]
    for piece in _cut(np.flatnonzero(unknown)):
        yield one.numbers[piece], one.pages[piece], None
    # The last copy already has the content of these pages.
    rest = stale.copy()
    rest[one.numbers] = False
    rest[one.whole] = True
    for numbers in _cut(np.flatnonzero(rest)):
        yield numbers, last.pages[numbers], None


def _cut(numbers: Numbers) -> Iterator[Numbers]:
    for begin in range(0, len(numbers), _MOST_PAGES):
        yield numbers[begin : begin + _MOST_PAGES]
