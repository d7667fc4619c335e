"""Capture the disks of a running guest with a libvirt backup: prepare, start, read, end.

Use it in a thread on the guest's host.
"""

import json
import os
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from vmckpt.capture.disks.plan import DiskPlan, Parent, plan
from vmckpt.capture.disks.reader import DiskReader, opened
from vmckpt.capture.memory.undo_process import left_behind
from vmckpt.errors import HypervisorError, OutcomeUnknown
from vmckpt.hypervisor.backup import Backups, BitmapLost
from vmckpt.model.disk import BackupOrder, DiskFacts, OpenBackup, OpenDisk, checkpoint_of
from vmckpt.util.host_files import Folder, path_of

_PATIENCE = 30.0
"""Seconds to wait for qemu-img to create an empty image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUndo:
    """The undo record of a disk capture."""

    guest: str
    """UUID of the guest."""
    snapshot: str
    socket: str
    """Path of the backup's socket, on the guest's host."""
    files: tuple[str, ...]
    """Paths of the socket and of the scratch files, on the guest's host."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a record from JSON. Raises ValueError if the text is not a valid record."""
        told = json.loads(text)
        try:
            undo = cls(**(told | {"files": tuple(told["files"])}))
        except (TypeError, LookupError) as exc:
            raise ValueError(f"invalid undo record of a backup: {text[:60]!r}") from exc
        if not all(
            isinstance(one, str) for one in (undo.guest, undo.snapshot, undo.socket, *undo.files)
        ):
            raise ValueError(f"invalid undo record of a backup: {text[:60]!r}")
        return undo


def put_back(backups: Backups, undo: DiskUndo, *, published: bool | None) -> None:
    """End the backup of a dead capture; may be repeated. Raises HypervisorError.

    `published`: whether the snapshot is in the store; None: unknown. The snapshot's checkpoint is
    removed only if `published` is False. To remove the files, call `remove_left` on the guest's
    host.
    """
    backups.end(undo.socket)
    if published is False:
        backups.forget(checkpoint_of(undo.snapshot))


def remove_left(files: Collection[str]) -> None:
    """Remove the files of a backup from this host. The backup must have ended."""
    for path in map(Path, files):
        with suppress(OSError), Folder(path.parent) as folder:
            folder.remove(path.name)


class DiskCapture:
    """The disks of one snapshot of a running guest. Use as `with DiskCapture(...) as disks`.

    Leaving the block ends the backup, and removes the new checkpoint unless `keep_bitmap` was
    called.
    """

    def __init__(
        self, backups: Backups, *, guest: str, host: str, snapshot: str, folder: Path
    ) -> None:
        """`guest`: a UUID; `folder`: an existing directory in which QEMU can create files."""
        self.plan: DiskPlan | None = None
        self._backups, self._host = backups, host
        self._snapshot = snapshot
        self._guest, self._folder = guest, folder
        self._order: BackupOrder | None = None
        """The backup requested from libvirt; None before the request."""
        self._opened: OpenBackup | None = None
        self._keep: tuple[str, ...] | None = None
        self._facts: tuple[DiskFacts, ...] = ()
        self._scratch_made = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End the backup. Raises CaptureFailed if parts of the backup may remain."""
        try:
            self.close()
        except HypervisorError as exc:
            raise left_behind(error or exc) from exc

    def prepare(self, parent: Parent | None, others: Collection[str] = ()) -> DiskUndo:
        """Plan the backup. Returns the undo record, to be stored before the backup starts.

        `others`: IDs of the guest's latest snapshots in other stores. Their checkpoints and the
        parent's checkpoint are kept. All other checkpoints of vmckpt are leftovers of crashes and
        are removed. Raises HypervisorError.
        """
        if (left := self._backups.opened()) is not None:
            raise HypervisorError(
                f"{self._host}: another backup job of the guest is active"
                f" ({left.socket or 'not started by vmckpt'})",
                host=self._host,
                hint="run vmckpt recover" if left.ours else "wait until the backup has ended",
            )
        lines = [*others, *([parent.id] if parent is not None else [])]
        self._backups.sweep([checkpoint_of(one) for one in lines])
        self._facts = self._backups.facts()
        found = plan(self._facts, parent, self._backups.checkpoints())
        if found.redefine and self._backups.redefine(found.redefine):
            found = found.whole(None, "libvirt cannot find the bitmaps of the last snapshot")
        self.plan = found
        order = self._ordered(found)
        return DiskUndo(
            guest=self._guest, snapshot=self._snapshot, socket=order.socket, files=_files(order)
        )

    def make_room(self) -> None:
        """Create the scratch files. Call this after the undo record is stored, before the pause.

        If this fails, libvirt creates the files itself.
        """
        if self.plan is None or not self.plan.captured:
            return
        self._order = self._ordered(self.plan)
        sizes = {disk.name: disk.size for disk in self._facts}
        made = [
            size is not None and _made(self._order.scratch(disk.name), size)
            for disk in self._order.disks
            for size in [sizes.get(disk.name)]
        ]
        self._scratch_made = all(made)
        if not self._scratch_made:
            remove_left(_files(self._order))

    def _ordered(self, plan_: DiskPlan) -> BackupOrder:
        order = plan_.order(self._snapshot, str(self._folder))
        return replace(order, scratch_made=self._scratch_made)

    def freeze_point(self) -> None:
        """Start the backup now, if there are disks to capture.

        If a bitmap turns out to be broken, the backup is restarted without the bitmap. Raises
        HypervisorError.
        """
        while self.plan is not None and self.plan.captured:
            self._order = self._ordered(self.plan)
            try:
                self._opened = self._backups.begin(self._order)
            except BitmapLost as exc:
                whole = self.plan.whole(exc.disk, "libvirt reports its bitmap as missing or broken")
                if whole == self.plan:
                    raise
                self.plan = whole
                continue
            return

    def restart(self) -> None:
        """End the backup, so that `freeze_point` can start a new one. Raises HypervisorError."""
        self.close()
        self._opened, self._scratch_made = None, False
        self.make_room()

    @property
    def disks(self) -> tuple[OpenDisk, ...]:
        """The disks that can be read now."""
        return self._opened.disks if self._opened is not None else ()

    @property
    def facts(self) -> tuple[DiskFacts, ...]:
        """Facts about the disks that can be read now."""
        names = {disk.name for disk in self.disks}
        return tuple(one for one in self._facts if one.name in names)

    def reader(self, disk: OpenDisk) -> DiskReader:
        """Open a disk for reading. Raises ValueError if no backup is open, and HypervisorError."""
        if self._opened is None:
            raise ValueError("no backup job is active")
        return opened(self._opened, disk, self._host)

    def end(self) -> None:
        """End the backup after all data is read, so that overwritten data is no longer kept.

        Raises HypervisorError.
        """
        if self._order is not None:
            self._backups.end(self._order.socket)
            self._opened = None

    def keep_bitmap(self, others: Collection[str] = ()) -> None:
        """Keep the checkpoint for the next snapshot. Call this once this snapshot is published.

        `others`: IDs of the guest's latest snapshots in other stores.
        """
        self._keep = tuple(checkpoint_of(one) for one in (self._snapshot, *others))

    def close(self) -> None:
        """End the backup, and remove its files. Raises HypervisorError."""
        order, self._order = self._order, None
        if order is None:
            return
        try:
            try:
                self._let_go(order)
            except OutcomeUnknown:  # a new connection shows the outcome; the steps can be repeated
                self._let_go(order)
        finally:
            remove_left(_files(order))

    def _let_go(self, order: BackupOrder) -> None:
        self._backups.end(order.socket)
        if self._keep is None:
            self._backups.forget(order.checkpoint)
        else:
            with suppress(HypervisorError):  # the next snapshot also removes old checkpoints
                self._backups.sweep(self._keep)


def _made(path: str, size: int) -> bool:
    """Create a scratch image for data that the guest overwrites. Returns whether that succeeded.

    libvirt sets the disk as the image's backing file, and passes the image to QEMU. No other user
    may read the image, since it contains data of the disk. QEMU's user owns the directory.
    """
    place = Path(path)
    try:
        with Folder(place.parent) as folder:
            file = folder.renew(place.name)
        try:
            words = ["qemu-img", "create", "-q", "-f", "qcow2", "--", path_of(file), str(size)]
            done = subprocess.run(
                words, capture_output=True, check=False, timeout=_PATIENCE, pass_fds=(file,)
            )
        finally:
            os.close(file)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _files(order: BackupOrder) -> tuple[str, ...]:
    return (order.socket, *(order.scratch(disk.name) for disk in order.disks))
