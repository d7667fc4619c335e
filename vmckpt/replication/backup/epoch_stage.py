"""Stage epochs on the backup: receive an epoch's parts, commit it, apply it to the standby.

Each part is decoded and staged: disk writes in a log on a disk, everything else in a directory on
tmpfs. Renaming the epoch's record commits the epoch. A committed epoch is applied to the standby
even if the agent or the host fails repeatedly; an uncommitted epoch is never applied.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
"""Maximum size of one message's records after decompression."""

_LOCK, _RECORD, _PAGES = "lock", "committed", "pages"
_STATES = ("state-0", "state-1")
WRITES = "writes"
"""File name of the disk log in its directory."""


class Stage:
    """The staging area of one standby. Use as `with Stage(...) as stage`, in one thread at a time.

    For each epoch, call `take` for its parts and `seal` to commit it, acknowledge the epoch to the
    primary, then call `apply`. If a part fails for any reason, the complete epoch must be sent
    again.
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
        """Open the staging area, and apply an epoch that was committed but not applied.

        `folder` is a directory on tmpfs, `log` a directory on a disk. Both are used for this guest
        only and are created if missing. `standby` identifies the process that has the memory: an
        epoch that was committed for another process is discarded. Raises StageError, and any error
        of the disks.
        """
        self._folder, self._memory, self._disks = folder, tuple(memory), tuple(disks)
        self._process = standby
        self._standby = self._identity()
        self._record: Record | None = None
        self._applied = True
        self._state: bytes | None = None
        """Device state of the last committed epoch."""
        self._open: int | None = None
        """The epoch whose parts are being staged; None: no epoch is open."""
        self._open_state: bytes | None = None
        self.noted: redo_log.Noted | None = None
        """Called with the pages that an epoch changes. Set it only while no method of this object
        is running; `use` and `start_over` reset it to None."""
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
        """Release the directory for another process. Removes no files."""
        self._held.close()

    @property
    def committed(self) -> int:
        """The last committed epoch; 0: none, and the standby is not consistent."""
        return self._record.epoch if self._record is not None else 0

    @property
    def last(self) -> Record | None:
        """The record of the last committed epoch; None: no epoch was committed."""
        return self._record

    @property
    def applied(self) -> bool:
        """Whether memory and disks are in the state of the last committed epoch.

        True if no epoch was committed.
        """
        return self._applied

    def state(self) -> bytes:
        """Return the device state of the last committed epoch.

        Raises StageError if no epoch was committed.
        """
        if self._state is None:
            raise StageError("no epoch was committed: there is no device state")
        return self._state

    def use(self, memory: Sequence[Memory]) -> None:
        """Use other memory files from now on: memory was plugged into the standby.

        The last committed epoch stays valid, since its guest does not know of the new memory. The
        open epoch is discarded. Raises StageError; the standby then has no committed epoch for a
        later agent.
        """
        self._must_be_applied()
        self.discard()
        self.noted = None
        self._memory = tuple(memory)
        self._standby = self._identity()
        if self._record is not None:
            record = replace(self._record, standby=self._standby)
            with redo_log.explained(str(self._folder)):
                redo_log.publish(record, self._folder / _RECORD, applied=True)
            self._record = record

    def _identity(self) -> str:
        """Return what identifies the standby: its process, and the sizes of memory and disks."""
        sizes = [len(one.pages) for one in self._memory], [one.size for one in self._disks]
        return json.dumps([self._process, *sizes])

    def bulk(self, part: Part) -> None:
        """Apply a part of the first copy, epoch 0, to the standby immediately.

        Raises WireError, StageError, and any error of the disks.
        """
        with self._taking(part):
            if self._open is not None:
                raise OutOfOrder(f"a part of the first copy arrived during epoch {self._open}")
            match part:
                case Pages() if part.epoch == 0:
                    numbers, pages = self._decoded(part)
                    self._memory[part.file].pages[numbers] = pages
                case Writes() if part.epoch == 0:
                    redo_log.write_records(self._unpacked(part), self._disks[part.disk])
                case _:
                    raise OutOfOrder(f"a part of epoch {part.epoch} arrived during the first copy")

    def take(self, part: Part) -> None:
        """Stage a part of an epoch. A part of a new epoch discards the open epoch.

        Raises WireError, StageError.
        """
        with self._taking(part):
            if part.epoch == 0:
                raise OutOfOrder("a part of the first copy arrived among the parts of an epoch")
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
        """Commit the open epoch if it is complete. Returns its number, which may be acknowledged.

        Raises WireError, StageError; in that case, the last committed epoch is unchanged.
        """
        self._must_be_applied()
        try:
            self._order.take(seal)
            if self._open != seal.epoch or self._open_state is None:
                raise OutOfOrder(f"epoch {seal.epoch} arrived without a device state")
            with redo_log.explained(f"committing epoch {seal.epoch}"):
                if self._record is None:
                    for disk in self._disks:  # the first copy must also be on stable storage
                        disk.flush()
                self._commit(seal)
        except BaseException:
            self._look()  # only the record shows whether the epoch was committed
            raise
        return self.committed

    def apply(self) -> None:
        """Apply the last committed epoch to the standby, unless it is already applied.

        After an error, call this method again or reopen the stage. The standby is not consistent
        until this method has succeeded. Raises StageError, and any error of the disks.
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
        """Discard an epoch that was not sealed, for example after the connection was lost."""
        self._open = None
        self._order = Order(self.committed)

    def start_over(self) -> None:
        """Discard the committed epoch and prepare for a first copy.

        Raises StageError, also if there is not enough space for later epochs.
        """
        self.noted = None
        with redo_log.explained(str(self._folder)):
            (self._folder / _RECORD).unlink(missing_ok=True)
        self._look()
        for folder in (self._folder, self._log.path.parent):
            with redo_log.explained(f"reserving space for epochs in {folder}"):
                redo_log.try_room(folder)

    def _look(self) -> None:
        """Read the last committed epoch. Raises StageError."""
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
        """Verify the files of a record that are still needed. Returns the device state.

        Raises StageDamaged if a file differs from what was written, and OSError.
        """
        kept = [self._states[record.slot].holds(record.state)]
        if not applied:
            kept.append(self._pages.holds(record.pages))
            if record.writes.length:
                kept.append(self._log.holds_epoch(record.epoch, record.writes))
        if not all(kept):
            raise redo_log.damaged(f"the committed epoch {record.epoch} in {self._folder}")
        return bytes(self._states[record.slot].read(0, record.state.length))

    @contextmanager
    def _taking(self, part: Part) -> Iterator[None]:
        """Check that a part is in order; the block stages it. On failure, discard the epoch."""
        self._must_be_applied()
        try:
            self._order.take(part)
            with redo_log.explained(f"staging epoch {part.epoch}"):
                if self._log.sealed > self.committed:
                    self._log.reseal(self.committed)
                yield
        except BaseException:
            self.discard()
            raise

    def _must_be_applied(self) -> None:
        if not self._applied:
            raise ValueError(f"epoch {self.committed} is committed but not applied yet")

    def _begin(self, epoch: int) -> None:
        self._open, self._open_state = epoch, None
        for one in (self._pages, self._log, self._states[self._free_slot()]):
            one.rewind()

    def _free_slot(self) -> int:
        return 0 if self._record is None else 1 - self._record.slot

    def _decoded(self, part: Pages) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
        if part.file >= len(self._memory):
            raise damaged(
                f"pages of memory file {part.file}; the number of files is {len(self._memory)}"
            )
        pages = self._memory[part.file].pages
        return page_codec.decode(part.data, lambda numbers: pages[numbers], pages=len(pages))

    def _unpacked(self, part: Writes) -> bytes:
        if part.disk >= len(self._disks):
            raise damaged(f"writes to disk {part.disk}; the number of disks is {len(self._disks)}")
        try:
            size = zstandard.frame_content_size(part.data)
            if not 0 <= size <= LARGEST_WRITES:
                raise ValueError(f"{size} bytes of data; at most {LARGEST_WRITES} are allowed")
            data = zstandard.ZstdDecompressor().decompress(
                part.data, max_output_size=LARGEST_WRITES, allow_extra_data=False
            )
            redo_log.check_records(data, self._disks[part.disk].size)
        except (ValueError, zstandard.ZstdError) as exc:
            raise damaged(f"invalid writes to disk {part.disk}: {exc}") from exc
        return data

    def _take_state(self, part: DeviceState) -> None:
        if self._open_state is not None:
            raise OutOfOrder(f"epoch {part.epoch} arrived with two device states")
        state = page_codec.decode_state(part.data, self._state)
        self._states[self._free_slot()].append(state)
        self._open_state = state

    def _commit(self, seal: EpochEnd) -> None:
        """Publish the record of the open epoch. A failure before the rename changes nothing.

        Raises OSError.
        """
        slot = self._free_slot()
        log, state = self._log, self._states[slot]
        # The first header marks the disks as consistent from now on.
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
    """Lock a file for this process. Returns its descriptor.

    Raises OSError; StageError if another process has the lock.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(file)
        raise StageError(
            f"{path.parent}: another agent is using this guest's standby",
            hint="wait until that agent has exited",
        ) from exc
    return file
