"""The backup's end of an epoch: taken in parts, committed as a whole, then given to the standby.

A part is decoded and kept aside, in a folder on tmpfs and, for disks, in a log on a disk. An epoch
is committed by the rename of its record; from then on it reaches the standby, however often
somebody dies on the way. What was not committed never does.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from vmckpt.replication.backup import redo_log
from vmckpt.replication.backup.redo_log import DiskLog, Memory, Record, Sink, StagedFile, StageError
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.messages import (
    DeviceState,
    EpochEnd,
    Order,
    OutOfOrder,
    Pages,
    Part,
    Writes,
    damaged,
)
from vmckpt.units import MIB
from vmckpt.util import atomic_file

LARGEST_WRITES = 64 * MIB
"""Bytes of records that one message may hold when they are unpacked."""

_LOCK, _RECORD, _PAGES = "lock", "committed", "pages"
_STATES = ("state-0", "state-1")
WRITES = "writes"
"""The disk log's name in its folder."""


class Stage:
    """Use as `with Stage(...) as stage`; one thread at a time.

    take, take, …, seal (the epoch is committed), acknowledge it, apply; and so on. A part that
    fails, for whatever reason, ends its epoch: all of it must be sent again.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        memory: Sequence[Memory],
        disks: Sequence[Sink],
        *,
        standby: str = "",
    ) -> None:
        """`folder` on tmpfs, `log` on a disk; both are this guest's alone and are made if missing.

        `standby` names the process whose memory it is: what was committed to another is nothing
        any more. An epoch that was committed and not applied is applied. Raises StageError, and
        what the disks raise.
        """
        self._folder, self._memory, self._disks = folder, tuple(memory), tuple(disks)
        sizes = [len(one.pages) for one in self._memory], [one.size for one in self._disks]
        self._standby = json.dumps([standby, *sizes])
        self._record: Record | None = None
        self._applied = True
        self._state: bytes | None = None
        """The committed one."""
        self._open: int | None = None
        """The epoch of which something is kept."""
        self._open_state: bytes | None = None
        self.noted: redo_log.Noted | None = None
        """Is told what an epoch changes in memory. Only between two calls may it be set; it is gone
        once the standby is copied anew."""
        with ExitStack() as stack, redo_log.explained(f"{folder} and {log}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.callback(os.close, _locked(folder / _LOCK))
            self._pages = StagedFile(folder / _PAGES)
            stack.callback(self._pages.close)
            self._states = [StagedFile(folder / name) for name in _STATES]
            for one in self._states:
                stack.callback(one.close)
            self._log = DiskLog(log / WRITES)
            stack.callback(self._log.close)
            atomic_file.sync_folder(log)
            self._look()
            self.apply()
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the folder; nothing is removed."""
        self._held.close()

    @property
    def committed(self) -> int:
        """The last epoch committed; 0: none, and the standby is nothing whole."""
        return self._record.epoch if self._record is not None else 0

    @property
    def last(self) -> Record | None:
        """The last epoch committed, and when it was taken; None: none was."""
        return self._record

    @property
    def applied(self) -> bool:
        """Whether memory and disks are those of the last committed epoch."""
        return self._applied

    def state(self) -> bytes:
        """The device state of the last committed epoch. Raises StageError: none is."""
        if self._state is None:
            raise StageError("no epoch was committed: there is no device state")
        return self._state

    def bulk(self, part: Part) -> None:
        """A part of the first copy, epoch 0: given to the standby at once.

        Raises WireError, StageError, and what the disks raise.
        """
        with self._taking(part):
            if self._open is not None:
                raise OutOfOrder(f"a first copy in the middle of epoch {self._open}")
            match part:
                case Pages() if part.epoch == 0:
                    numbers, pages = self._decoded(part)
                    self._memory[part.file].pages[numbers] = pages
                case Writes() if part.epoch == 0:
                    redo_log.write_records(self._unpacked(part), self._disks[part.disk])
                case _:
                    raise OutOfOrder(f"epoch {part.epoch} is no first copy, or has a device state")

    def take(self, part: Part) -> None:
        """Keep a part of an epoch; one of another epoch than before forgets that one.

        Raises WireError, StageError.
        """
        with self._taking(part):
            if part.epoch == 0:
                raise OutOfOrder("a part of the first copy among those of an epoch")
            if self._open != part.epoch:
                self._begin(part.epoch)
            match part:
                case Pages():
                    redo_log.add_pages(self._pages, part.file, *self._decoded(part))
                case Writes():
                    redo_log.add_writes(self._log, part.disk, self._unpacked(part))
                case DeviceState():
                    self._take_state(part)

    def seal(self, seal: EpochEnd) -> int:
        """Commit the epoch if it is whole, and say which; it may be acknowledged then.

        Raises WireError, StageError; the last committed epoch stays what it was.
        """
        self._must_be_applied()
        try:
            self._order.take(seal)
            if self._open != seal.epoch or self._open_state is None:
                raise OutOfOrder(f"epoch {seal.epoch} came without a device state")
            with redo_log.explained(f"committing epoch {seal.epoch}"):
                if self._record is None:
                    for disk in self._disks:  # the first copy, too, must be there for good
                        disk.flush()
                self._commit(seal)
        except BaseException:
            self._look()  # the record alone knows how far it came
            raise
        return self.committed

    def apply(self) -> None:
        """Give the last committed epoch to the standby; once that is done, it does nothing.

        After an error it may be tried again, here or by opening the stage anew, and until it has
        succeeded the standby is nothing whole. Raises StageError, and what the disks raise.
        """
        if self._record is None or self._applied:
            return
        with redo_log.explained(f"applying epoch {self._record.epoch}"):
            redo_log.put_pages(self._pages, self._record.pages.length, self._memory, self.noted)
            redo_log.put_writes(self._log, self._record.writes.length, self._disks)
            redo_log.mark_applied(self._folder / _RECORD)
            self._applied = True
            self._pages.trim()
            self._log.trim()

    def discard(self) -> None:
        """Forget an epoch that was not sealed: the connection has ended."""
        self._open = None
        self._order = Order(self.committed)

    def start_over(self) -> None:
        """Nothing is committed any more, and a first copy may come. Raises StageError, also where
        there would be no room for epochs after it."""
        self.noted = None
        with redo_log.explained(str(self._folder)):
            (self._folder / _RECORD).unlink(missing_ok=True)
        self._look()
        for folder in (self._folder, self._log.path.parent):
            with redo_log.explained(f"room for epochs in {folder}"):
                redo_log.try_room(folder)

    def _look(self) -> None:
        """Learn what is committed. Raises StageError."""
        self._record, self._applied, self._state = None, True, None
        self.discard()
        with redo_log.explained(str(self._folder)):
            found = Record.load(self._folder / _RECORD)
            if found is None:
                return
            record, applied = found
            if record.standby != self._standby:
                (self._folder / _RECORD).unlink()
                return
            state = self._checked(record, applied)
        self._record, self._applied, self._state = record, applied, state
        self.discard()

    def _checked(self, record: Record, applied: bool) -> bytes:
        """The device state of a record, if all that is still needed of it is as it was written."""
        kept = [self._states[record.slot].holds(record.state)]
        if not applied:
            kept.append(self._pages.holds(record.pages))
            if record.writes.length:
                kept.append(self._log.holds_epoch(record.epoch, record.writes))
        if not all(kept):
            raise redo_log.damaged(f"what was committed of epoch {record.epoch} in {self._folder}")
        return bytes(self._states[record.slot].read(0, record.state.length))

    @contextmanager
    def _taking(self, part: Part) -> Iterator[None]:
        """A part that fails must not be missed by the seal: its epoch is forgotten."""
        self._must_be_applied()
        try:
            self._order.take(part)
            with redo_log.explained(f"taking epoch {part.epoch}"):
                if self._log.sealed > self.committed:
                    self._log.reseal(self.committed)
                yield
        except BaseException:
            self.discard()
            raise

    def _must_be_applied(self) -> None:
        if not self._applied:
            raise ValueError(f"epoch {self.committed} is committed and not applied yet")

    def _begin(self, epoch: int) -> None:
        self._open, self._open_state = epoch, None
        for one in (self._pages, self._log, self._states[self._free_slot()]):
            one.rewind()

    def _free_slot(self) -> int:
        return 0 if self._record is None else 1 - self._record.slot

    def _decoded(self, part: Pages) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
        if part.file >= len(self._memory):
            raise damaged(f"pages of memory file {part.file} of {len(self._memory)}")
        pages = self._memory[part.file].pages
        return page_codec.decode(part.data, lambda numbers: pages[numbers], pages=len(pages))

    def _unpacked(self, part: Writes) -> bytes:
        if part.disk >= len(self._disks):
            raise damaged(f"writes to disk {part.disk} of {len(self._disks)}")
        try:
            size = zstandard.frame_content_size(part.data)
            if not 0 <= size <= LARGEST_WRITES:
                raise ValueError(f"{size} bytes in one message")
            data = zstandard.ZstdDecompressor().decompress(
                part.data, max_output_size=LARGEST_WRITES, allow_extra_data=False
            )
            redo_log.check_records(data, self._disks[part.disk].size)
        except (ValueError, zstandard.ZstdError) as exc:
            raise damaged(f"writes to disk {part.disk} that cannot be done: {exc}") from exc
        return data

    def _take_state(self, part: DeviceState) -> None:
        if self._open_state is not None:
            raise OutOfOrder(f"epoch {part.epoch} came with two device states")
        state = page_codec.decode_state(part.data, self._state)
        self._states[self._free_slot()].append(state)
        self._open_state = state

    def _commit(self, seal: EpochEnd) -> None:
        """Raises OSError. What happens up to the rename has not happened."""
        slot = self._free_slot()
        log, state = self._log, self._states[slot]
        # The first head says that the disks are whole from now on.
        sealed = log.length > 0 or self._record is None
        record = Record(
            epoch=seal.epoch, pages=self._pages.content(), state=state.content(), slot=slot,
            writes=log.seal(seal.epoch) if sealed else redo_log.NOTHING,
            final=seal.final, taken=seal.taken, standby=self._standby,
        )  # fmt: skip
        redo_log.publish(record, self._folder / _RECORD)
        self._record, self._applied, self._state = record, False, self._open_state
        self._open = None


def _locked(path: Path) -> int:
    """Hold a file for this process alone. Raises OSError, StageError if another one has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(file)
        raise StageError(
            f"{path.parent}: another agent is at this guest's standby", hint="let that one end"
        ) from exc
    return file
