"""The disks of one snapshot: what can be done before the instant, the instant, reading, and the end
that comes whatever happens. For a thread on the guest's host.
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
"""Seconds for qemu-img to make an empty image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUndo:
    """What a capture of disks leaves behind if it dies."""

    guest: str
    """Its UUID."""
    snapshot: str
    socket: str
    """Of the backup, on the guest's host."""
    files: tuple[str, ...]
    """It and the scratch files."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if it is none."""
        told = json.loads(text)
        try:
            undo = cls(**(told | {"files": tuple(told["files"])}))
        except (TypeError, LookupError) as exc:
            raise ValueError(f"no facts of a backup: {text[:60]!r}") from exc
        if not all(
            isinstance(one, str) for one in (undo.guest, undo.snapshot, undo.socket, *undo.files)
        ):
            raise ValueError(f"no facts of a backup: {text[:60]!r}")
        return undo


def put_back(backups: Backups, undo: DiskUndo, *, published: bool | None) -> None:
    """End a dead capture's backup; may be repeated. Raises HypervisorError.

    `published`: the snapshot can be relied on, so its checkpoint stays; None: it stays because
    nobody knows yet. The files are to be removed
    where they are: on the guest's host with `remove_left`.
    """
    backups.end(undo.socket)
    if published is False:
        backups.forget(checkpoint_of(undo.snapshot))


def remove_left(files: Collection[str]) -> None:
    """Remove a backup's files on this host; its backup must have ended."""
    for path in map(Path, files):
        with suppress(OSError), Folder(path.parent) as folder:
            folder.remove(path.name)


class DiskCapture:
    """The disks of one snapshot. Use as `with DiskCapture(...) as disks`.

    Leaving it ends the backup; the new checkpoint goes too, unless `keep_bitmap` was called.
    """

    def __init__(
        self, backups: Backups, *, guest: str, host: str, snapshot: str, folder: Path
    ) -> None:
        """`guest` is a UUID; `folder` is there, and QEMU may make files in it."""
        self.plan: DiskPlan | None = None
        self._backups, self._host = backups, host
        self._snapshot = snapshot
        self._guest, self._folder = guest, folder
        self._order: BackupOrder | None = None
        """What was asked of libvirt; None: nothing yet."""
        self._opened: OpenBackup | None = None
        self._keep: tuple[str, ...] | None = None
        self._facts: tuple[DiskFacts, ...] = ()
        self._scratch_made = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raises CaptureFailed if it may be that not all of it is ended."""
        try:
            self.close()
        except HypervisorError as exc:
            raise left_behind(error or exc) from exc

    def prepare(self, parent: Parent | None, others: Collection[str] = ()) -> DiskUndo:
        """Look and decide, before the instant; what is to be noted before it is taken.

        `others` are last snapshots of the guest's other lines: their checkpoints stay too, while
        what else there is of ours is left from a crash and goes. Raises HypervisorError.
        """
        if (left := self._backups.opened()) is not None:
            raise HypervisorError(
                f"{self._host}: another backup of the guest is open ({left.socket or 'not ours'})",
                host=self._host,
                hint="run vmckpt recover" if left.ours else "wait until it has ended",
            )
        lines = [*others, *([parent.id] if parent is not None else [])]
        self._backups.sweep([checkpoint_of(one) for one in lines])
        self._facts = self._backups.facts()
        found = plan(self._facts, parent, self._backups.checkpoints())
        if found.redefine and self._backups.redefine(found.redefine):
            found = found.whole(None, "libvirt does not find the bitmaps of the last snapshot")
        self.plan = found
        order = self._ordered(found)
        return DiskUndo(
            guest=self._guest, snapshot=self._snapshot, socket=order.socket, files=_files(order)
        )

    def make_room(self) -> None:
        """Make the scratch files, so that the guest need not wait for it; after the noting.

        Where that fails libvirt makes them itself.
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
        """The instant, if there are disks to capture. Raises HypervisorError.

        A bitmap that only now turns out to be broken costs a second call.
        """
        while self.plan is not None and self.plan.captured:
            self._order = self._ordered(self.plan)
            try:
                self._opened = self._backups.begin(self._order)
            except BitmapLost as exc:
                whole = self.plan.whole(exc.disk, "libvirt finds its bitmap missing or broken")
                if whole == self.plan:
                    raise
                self.plan = whole
                continue
            return

    def restart(self) -> None:
        """Another instant is taken: the one before never was. Raises HypervisorError."""
        self.close()
        self._opened, self._scratch_made = None, False
        self.make_room()

    @property
    def disks(self) -> tuple[OpenDisk, ...]:
        """Those that can be read now."""
        return self._opened.disks if self._opened is not None else ()

    @property
    def facts(self) -> tuple[DiskFacts, ...]:
        """Of those that can be read now."""
        names = {disk.name for disk in self.disks}
        return tuple(one for one in self._facts if one.name in names)

    def reader(self, disk: OpenDisk) -> DiskReader:
        """One of them. Raises HypervisorError."""
        if self._opened is None:
            raise ValueError("no backup is open")
        return opened(self._opened, disk, self._host)

    def end(self) -> None:
        """All is read: what the guest writes need not be kept aside any more."""
        if self._order is not None:
            self._backups.end(self._order.socket)
            self._opened = None

    def keep_bitmap(self, others: Collection[str] = ()) -> None:
        """The snapshot is published: its checkpoint is what the next one begins with.

        `others` are last snapshots of the guest's other lines.
        """
        self._keep = tuple(checkpoint_of(one) for one in (self._snapshot, *others))

    def close(self) -> None:
        """End what is open. Raises HypervisorError if that cannot be."""
        order, self._order = self._order, None
        if order is None:
            return
        try:
            try:
                self._let_go(order)
            except OutcomeUnknown:  # another connection knows, and it may all be said again
                self._let_go(order)
        finally:
            remove_left(_files(order))

    def _let_go(self, order: BackupOrder) -> None:
        self._backups.end(order.socket)
        if self._keep is None:
            self._backups.forget(order.checkpoint)
        else:
            with suppress(HypervisorError):  # the next one sweeps again
                self._backups.sweep(self._keep)


def _made(path: str, size: int) -> bool:
    """An image for what the guest overwrites; libvirt sets the disk itself below it.

    It is a part of the guest's disk: libvirt gives it to QEMU, and no other user may read it. QEMU
    owns the folder.
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
