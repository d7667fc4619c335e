"""NVRAM and TPM state out of a snapshot, put there as images are: whole, or as it was before."""

import os
import pwd
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from vmckpt.agent import replacement
from vmckpt.agent.replacement import Replacement
from vmckpt.errors import BadInput
from vmckpt.util.host_files import Folder

# Who runs the TPM's program, by distribution.
_TPM_USERS = ("swtpm", "tss")
_TPM = "tpm/"


class SmallFiles:
    """The files of one restore. Use as a context manager: what was not kept is taken back."""

    def __init__(
        self, files: Mapping[str, bytes], places: Mapping[str, str], snapshot: str, *, replace: bool
    ) -> None:
        """`places`: where each is to be, by its name in the snapshot. Raises BadInput."""
        missing = sorted(set(files) - set(places))
        if missing:
            raise BadInput(f"nobody said where file {missing[0]} is to be")
        self._contents, self._snapshot = files, snapshot
        self._places = {name: Path(places[name]) for name in files}
        self._replace = replace
        self._files: dict[str, Replacement] = {}
        """By their names in the snapshot."""
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
        """Make all of them beside their places. Raises BadInput, OSError."""
        for place in self._places.values():
            replacement.check(place, self._snapshot, replace=self._replace)
        for name, place in self._places.items():
            self._folder(place.parent, tpm=name.startswith(_TPM)).close()
            file = self._files[name] = Replacement(place, self._snapshot)
            with os.fdopen(file.create(), "wb", closefd=False) as out:
                out.write(self._contents[name])
                out.flush()
                os.fsync(out.fileno())

    def swap(self) -> None:
        """Put them in their places; what is there is put aside until `keep`. Raises OSError.

        libvirt itself gives NVRAM to QEMU, and a TPM's folder but not its files to the TPM's
        program.
        """
        for name, file in self._files.items():
            file.swap(_tpm_owner() if name.startswith(_TPM) else None)

    def keep(self) -> None:
        """They are in use: what was put aside goes."""
        self._left = True
        for file in self._files.values():
            file.keep()

    def leave(self) -> None:
        """Nobody knows whether they are in use: nothing is taken back."""
        self._left = True

    def _folder(self, path: Path, *, tpm: bool) -> Folder:
        with suppress(FileNotFoundError):
            return Folder(path)
        with self._folder(path.parent, tpm=tpm) as above:
            # QEMU is given the files, not their folders.
            made = above.make(path.name, 0o700 if tpm else 0o711)
            self._made.append(path)
            if tpm and (owner := _tpm_owner()) is not None:
                made.give(*owner)
            return made


def _drop(folder: Path) -> None:
    with suppress(OSError), Folder(folder.parent) as above:
        above.drop(folder.name)


def _tpm_owner() -> tuple[int, int] | None:
    """User and group of the TPM's program; None: it is not installed here."""
    for user in _TPM_USERS:
        with suppress(KeyError):
            found = pwd.getpwnam(user)
            return found.pw_uid, found.pw_gid
    return None
