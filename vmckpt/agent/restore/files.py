"""Restore the files of a snapshot (disks, NVRAM, TPM state), and remove the images of a fork.

Each file is created next to its final path and swapped in, so it is either replaced completely or
left unchanged.
"""

import os
import pwd
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from vmckpt.agent.cleanup_orders import DiscardOrder
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import base_images, replace_file
from vmckpt.agent.restore.base_images import BaseImage, Comparison
from vmckpt.agent.restore.replace_file import Replacement
from vmckpt.capture.nbd.client import Client
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, Cancelled, StoreDamaged, StoreError
from vmckpt.store.assemble import Assembly, Source
from vmckpt.store.format.chunk_map import Kind
from vmckpt.store.format.metadata import DiskMake
from vmckpt.store.format.private_part import Private
from vmckpt.units import show_bytes
from vmckpt.util.host_files import Folder, path_of

_TURN = 0.2


class Images:
    """The disk images of one restore.

    Use as a context manager, which restores the previous images unless `keep` or `leave` was
    called.
    """

    def __init__(
        self, order: RestoreOrder, private: Private, reader: Source, channel: ControllerChannel
    ) -> None:
        self._order, self._private, self._reader = order, private, reader
        self._channel = channel
        self._files: dict[str, Replacement] = {}
        """The replacement of each disk's image, by the disk's name in the guest."""
        self._left = False
        self.bases: dict[str, str] = {}
        """Path of the base image of each new overlay, by the disk's name in the guest."""
        self.warnings: list[str] = []

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
        """Create all images, with their contents.

        Raises BadInput, StoreError, Cancelled, OSError.
        """
        for disk in self._private.facts.disks:
            place = Path(self._order.images[disk.target])
            replace_file.check_destination(place, self._order.snapshot, replace=self._order.replace)
        for disk in self._private.facts.disks:
            self._make(disk)

    def marks(self) -> dict[str, str]:
        """Return the mark of each new image, by disk name. Must be called before `swap`.

        Raises OSError.
        """
        return {disk.target: self._file(disk).mark() for disk in self._private.facts.disks}

    def swap(self) -> None:
        """Move the previous images aside, and the new images into place. Raises OSError."""
        for disk in self._private.facts.disks:
            self._file(disk).swap()

    def keep(self) -> None:
        """Remove the previous images, since the new images are in use. Raises OSError."""
        self._left = True
        for file in self._files.values():
            file.keep()

    def leave(self) -> None:
        """Leave all images as they are, since it is unknown which of them are in use."""
        self._left = True

    def _file(self, disk: DiskMake) -> Replacement:
        if disk.target not in self._files:
            place = Path(self._order.images[disk.target])
            self._files[disk.target] = Replacement(place, self._order.snapshot)
        return self._files[disk.target]

    def _make(self, disk: DiskMake) -> None:
        region = self._private.region(disk.target)
        if region is None or region.kind is not Kind.DISK:
            raise StoreDamaged(f"the snapshot lacks the disk {disk.target!r}")
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
        words = ["qemu-img", "convert", "-q", "-W", "-t", "writeback", "-f", "raw"]
        words += ["-O", disk.format]
        base, why = self._base(disk), ""
        with ExitStack() as stack:
            if base is not None:
                try:
                    client = stack.enter_context(self._opened(base, disk.format))
                except BadInput as exc:
                    why = exc.message
                else:
                    stopped = self._channel.stop.is_set
                    compared = Comparison(read, assembly.zeros, region.size, client, stopped)
                    export = replace(export, extents=compared.kinds)
                    words += ["-B", base.path, "-F", base.format]
                    self.bases[disk.target] = base.path
            place = Unix(str(self._order.folder / "nbd"))
            server = stack.enter_context(Server({"": export}, place))
            self._run(self._file(disk), [*words, "--", server.uri()], trouble)
        if base is not None and why:
            self.warnings.append(
                f"disk {disk.target} was an overlay of {base.path}, and is now a complete image"
                f" ({show_bytes(self._file(disk).allocated())}): {why}"
            )

    def _base(self, disk: DiskMake) -> BaseImage | None:
        told = self._order.bases.get(disk.target)
        return None if told is None else BaseImage.parse(told)

    @contextmanager
    def _opened(self, base: BaseImage, format_: str) -> Iterator[Client]:
        """Open a base image. Raises BadInput if the new image cannot be its overlay."""
        order = self._order
        base_images.require_usable(base, format_, order.images.values(), order.users)
        with base_images.opened(base, order.folder / "base", order.host) as client:
            yield client

    def _run(
        self, image: Replacement, words: Sequence[str], trouble: Sequence[Exception], *more: str
    ) -> None:
        """Create an image by running `words` (qemu-img), the image's path and `more` as a command.

        `trouble`: errors of the server that provides the data. Raises the first of these errors,
        BadInput, or Cancelled.
        """
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
                if self._channel.stop.is_set():
                    program.kill()
                    raise Cancelled("stopped while writing a disk")
        if trouble:
            raise trouble[0]
        if program.returncode != 0:
            why = said.strip().splitlines()[-1:] or [f"status {program.returncode}"]
            raise BadInput(
                f"{image.place} could not be written: {why[0].replace(place, str(image.place))}"
            )


# The user of swtpm, which depends on the distribution.
_TPM_USERS = ("swtpm", "tss")
_TPM = "tpm/"


class SmallFiles:
    """The small files of one restore: NVRAM and TPM state.

    Use as a context manager, which restores the previous files unless `keep` or `leave` was called.
    """

    def __init__(
        self, files: Mapping[str, bytes], places: Mapping[str, str], snapshot: str, *, replace: bool
    ) -> None:
        """`places`: the final path of each file, by its name in the snapshot.

        `replace`: existing files may be replaced. Raises BadInput.
        """
        missing = sorted(set(files) - set(places))
        if missing:
            raise BadInput(f"the controller gave no path for the file {missing[0]} of the snapshot")
        self._contents, self._snapshot = files, snapshot
        self._places = {name: Path(places[name]) for name in files}
        self._replace = replace
        self._files: dict[str, Replacement] = {}
        """The replacement of each file, by its name in the snapshot."""
        self._made: list[Path] = []
        self._left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        files, self._files = self._files, {}
        with ExitStack() as stack:
            for folder in () if self._left else self._made:
                stack.callback(_drop, folder)
            for file in files.values():
                stack.callback(file.close)
                if not self._left:
                    stack.callback(file.take_back)

    def write(self) -> None:
        """Create all files next to their final paths. Raises BadInput, OSError."""
        for place in self._places.values():
            replace_file.check_destination(place, self._snapshot, replace=self._replace)
        for name, place in self._places.items():
            self._folder(place.parent, tpm=name.startswith(_TPM)).close()
            file = self._files[name] = Replacement(place, self._snapshot)
            with os.fdopen(file.create(), "wb", closefd=False) as out:
                out.write(self._contents[name])
                out.flush()
                os.fsync(out.fileno())

    def swap(self) -> None:
        """Move the previous files aside, and the new files into place. Raises OSError.

        swtpm's user becomes the owner of TPM files, since libvirt changes only the owner of their
        directory. For the NVRAM file, libvirt changes the owner itself.
        """
        for name, file in self._files.items():
            file.swap(_tpm_owner() if name.startswith(_TPM) else None)

    def keep(self) -> None:
        """Remove the previous files, since the new files are in use. Raises OSError."""
        self._left = True
        for file in self._files.values():
            file.keep()

    def leave(self) -> None:
        """Leave all files as they are, since it is unknown which of them are in use."""
        self._left = True

    def _folder(self, path: Path, *, tpm: bool) -> Folder:
        with suppress(FileNotFoundError):
            return Folder(path)
        with self._folder(path.parent, tpm=tpm) as above:
            # QEMU gets access to the files, but does not own their directories.
            made = above.make(path.name, 0o700 if tpm else 0o711)
            self._made.append(path)
            if tpm and (owner := _tpm_owner()) is not None:
                made.give(*owner)
            return made


def _drop(folder: Path) -> None:
    with suppress(OSError), Folder(folder.parent) as above:
        above.drop(folder.name)


def _tpm_owner() -> tuple[int, int] | None:
    """Return the IDs of the user and group that swtpm runs as; None: this host has no such user."""
    for user in _TPM_USERS:
        with suppress(KeyError):
            found = pwd.getpwnam(user)
            return found.pw_uid, found.pw_gid
    return None


def discard(order: DiscardOrder, _: ControllerChannel) -> dict[str, Any]:
    """Remove the finished and unfinished images of a fork; may be repeated. Raises OSError.

    Returns the number of removed files, under "removed".
    """
    removed = 0
    for place in map(Path, order.images.values()):
        for path in (place, *replace_file.paths(place, order.snapshot)):
            removed += replace_file.is_there(path)
            replace_file.remove(path)
    return {"removed": removed}
