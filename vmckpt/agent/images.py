"""Disk images out of a snapshot: made beside their places, and put there in one go."""

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from vmckpt.agent import replacement
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.replacement import Replacement
from vmckpt.agent.talk import Talk
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, Cancelled, StoreDamaged, StoreError
from vmckpt.store.assemble import Assembly, Source
from vmckpt.store.format.chunk_map import Kind
from vmckpt.store.format.metadata import DiskMake
from vmckpt.store.format.private_part import Private
from vmckpt.util.host_files import path_of

_TURN = 0.2


class Images:
    """The images of one restore. Use as a context manager: what was not kept is taken back."""

    def __init__(self, order: RestoreOrder, private: Private, reader: Source, talk: Talk) -> None:
        self._order, self._private, self._reader = order, private, reader
        self._talk = talk
        self._files: dict[str, Replacement] = {}
        """By target."""
        self._left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        files, self._files = self._files, {}
        with ExitStack() as stack:
            for file in files.values():
                stack.callback(file.close)
                if not self._left:
                    stack.callback(file.take_back)

    def write(self) -> None:
        """Make all of them, whole. Raises BadInput, StoreError, Cancelled."""
        for disk in self._private.facts.disks:
            place = Path(self._order.images[disk.target])
            replacement.check(place, self._order.snapshot, replace=self._order.replace)
        for disk in self._private.facts.disks:
            self._make(disk)

    def marks(self) -> dict[str, str]:
        """Of each, before it is in its place."""
        return {disk.target: self._file(disk).mark() for disk in self._private.facts.disks}

    def swap(self) -> None:
        """Put them in their places; what is there is put aside until `keep`. Raises OSError."""
        for disk in self._private.facts.disks:
            self._file(disk).swap()

    def keep(self) -> None:
        """They are in use: what was put aside goes."""
        self._left = True
        for file in self._files.values():
            file.keep()

    def leave(self) -> None:
        """Nobody knows whether they are in use: nothing is taken back."""
        self._left = True

    def _file(self, disk: DiskMake) -> Replacement:
        if disk.target not in self._files:
            place = Path(self._order.images[disk.target])
            self._files[disk.target] = Replacement(place, self._order.snapshot)
        return self._files[disk.target]

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
            self._run(self._file(disk), [*words, "--", server.uri()], trouble)

    def _run(
        self, image: Replacement, words: Sequence[str], trouble: Sequence[Exception], *more: str
    ) -> None:
        """Let qemu-img make an image; its path comes between `words` and `more`."""
        file = image.create()
        place = path_of(file)
        with subprocess.Popen(
            [*words, place, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            pass_fds=(file,),
        ) as program:  # fmt: skip
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
            raise BadInput(
                f"{image.place} was not written: {why[0].replace(place, str(image.place))}"
            )
