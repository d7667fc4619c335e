"""Disk images out of a snapshot: made beside their places, and put there in one go."""

import os
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.talk import Talk
from vmckpt.checkpoint.nbdserver import Server
from vmckpt.checkpoint.nbdsession import Export
from vmckpt.checkpoint.nbdwire import Unix
from vmckpt.errors import BadInput, Cancelled, StoreDamaged, StoreError
from vmckpt.store.assemble import Assembly, Source
from vmckpt.store.facts import DiskMake
from vmckpt.store.inside import Private
from vmckpt.store.regions import Kind

_TURN = 0.2


def beside(place: Path, snapshot: str) -> tuple[Path, Path]:
    """What an image is called until it is in its place, and what was there before, after that."""
    return Path(f"{place}.{snapshot}.new"), Path(f"{place}.{snapshot}.old")


def mark(image: Path) -> str:
    """By which an image is known again, and that nobody has written into it since."""
    found = image.stat()
    return f"{found.st_ino}:{found.st_mtime_ns}"


def free(place: Path, snapshot: str, *, replace: bool) -> None:
    """Raises BadInput if a file may not be put there."""
    aside = beside(place, snapshot)[1]
    if aside.exists():
        raise BadInput(
            f"{aside} is what an interrupted restore has put aside",
            mend="run vmckpt recover; if it stays, move it away",
        )
    if place.exists() and not replace:
        raise BadInput(
            f"{place} is there already",
            mend="say --replace to write over it, or choose another name or folder",
        )


def _as_it_was(new: Path, before: os.stat_result) -> None:
    """Right before it takes its place: while the guest ran that was QEMU's user's."""
    new.chmod(stat.S_IMODE(before.st_mode))
    os.chown(new, before.st_uid, before.st_gid)


class Images:
    """The images of one restore. Use as a context manager: what was not kept is taken back."""

    def __init__(self, order: RestoreOrder, private: Private, reader: Source, talk: Talk) -> None:
        self._order, self._private, self._reader = order, private, reader
        self._talk = talk
        self._swapped: list[DiskMake] = []
        self._left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for disk in reversed(self._swapped):
            place, aside = self._place(disk), self._aside(disk)
            if aside.exists():
                aside.replace(place)
            elif not self._new(disk).exists():
                place.unlink(missing_ok=True)  # it is ours, and nothing was there before
        self._swapped = []
        for disk in () if self._left else self._private.facts.disks:
            self._new(disk).unlink(missing_ok=True)

    def write(self) -> None:
        """Make all of them, whole. Raises BadInput, StoreError, Cancelled."""
        for disk in self._private.facts.disks:
            free(self._place(disk), self._order.snapshot, replace=self._order.replace)
        for disk in self._private.facts.disks:
            self._make(disk)

    def marks(self) -> dict[str, str]:
        """Of each, before it is in its place."""
        return {disk.target: mark(self._new(disk)) for disk in self._private.facts.disks}

    def swap(self) -> None:
        """Put them in their places; what is there is put aside until `keep`. Raises OSError."""
        for disk in self._private.facts.disks:
            place = self._place(disk)
            self._swapped.append(disk)
            if place.exists():
                _as_it_was(self._new(disk), place.stat())
                place.rename(self._aside(disk))
            self._new(disk).rename(place)

    def keep(self) -> None:
        """They are in use: what was put aside goes."""
        swapped, self._swapped = self._swapped, []
        for disk in swapped:
            self._aside(disk).unlink(missing_ok=True)

    def leave(self) -> None:
        """Nobody knows whether they are in use: nothing is taken back."""
        self._swapped, self._left = [], True

    def _place(self, disk: DiskMake) -> Path:
        return Path(self._order.images[disk.target])

    def _new(self, disk: DiskMake) -> Path:
        return beside(self._place(disk), self._order.snapshot)[0]

    def _aside(self, disk: DiskMake) -> Path:
        return beside(self._place(disk), self._order.snapshot)[1]

    def _make(self, disk: DiskMake) -> None:
        region = self._private.region(disk.target)
        if region is None or region.kind is not Kind.DISK:
            raise StoreDamaged(f"the snapshot has no disk {disk.target!r}")
        assembly = Assembly(
            region.kind, region.size, region.map, self._private.chunks, self._reader
        )
        trouble: list[Exception] = []

        def read(offset: int, length: int) -> bytes:
            try:
                return assembly.read_bytes(offset, length)
            except StoreError as exc:
                trouble.append(exc)
                raise

        export = Export(size=region.size, read=read, extents=assembly.zeros)
        socket = self._order.folder / "nbd"
        with Server({"": export}, Unix(str(socket))) as server:
            words = [
                "qemu-img",
                "convert",
                "-q",
                "-W",
                "-t",
                "writeback",
                "-f",
                "raw",
                "-O",
                disk.format,
            ]
            self._run([*words, "--", server.uri(), str(self._new(disk))], trouble)

    def _run(self, words: Sequence[str], trouble: Sequence[Exception]) -> None:
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, umask=0o077
        ) as program:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    _, said = program.communicate(timeout=_TURN)
                    break
                if self._talk.stop.is_set():
                    program.kill()
                    raise Cancelled("stopped while a disk was written")
        if trouble:
            raise trouble[0]
        if program.returncode != 0:
            why = said.strip().splitlines()[-1:] or [f"status {program.returncode}"]
            raise BadInput(f"{words[-1]} was not written: {why[0]}")
