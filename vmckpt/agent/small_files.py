"""NVRAM and TPM state out of a snapshot, put there as images are: whole, or as it was before."""

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from vmckpt.agent.images import beside, free
from vmckpt.errors import BadInput

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
        self._files, self._snapshot = files, snapshot
        self._places = {name: Path(places[name]) for name in files}
        self._replace = replace
        self._swapped: list[Path] = []
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for place in reversed(self._swapped):
            new, aside = beside(place, self._snapshot)
            if aside.exists():
                aside.replace(place)
            elif not new.exists():
                place.unlink(missing_ok=True)
        for place in self._places.values():
            beside(place, self._snapshot)[0].unlink(missing_ok=True)
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()
        self._swapped, self._made = [], []

    def write(self) -> None:
        """Make all of them beside their places. Raises BadInput, OSError."""
        for place in self._places.values():
            free(place, self._snapshot, replace=self._replace)
        for name, content in self._files.items():
            place = self._places[name]
            self._folder(place.parent, tpm=name.startswith(_TPM))
            new = beside(place, self._snapshot)[0]
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())

    def swap(self) -> None:
        """Put them in their places; what is there is put aside until `keep`. Raises OSError."""
        for name, place in self._places.items():
            new, aside = beside(place, self._snapshot)
            self._swapped.append(place)
            _owned(new, place, tpm=name.startswith(_TPM))
            if place.exists():
                place.rename(aside)
            new.rename(place)

    def keep(self) -> None:
        """They are in use: what was put aside goes."""
        swapped, self._swapped, self._made = self._swapped, [], []
        for place in swapped:
            beside(place, self._snapshot)[1].unlink(missing_ok=True)

    def leave(self) -> None:
        """Nobody knows whether they are in use: nothing is taken back."""
        self._swapped, self._made, self._places = [], [], {}

    def _folder(self, folder: Path, *, tpm: bool) -> None:
        if folder.is_dir():
            return
        self._folder(folder.parent, tpm=tpm)
        folder.mkdir(mode=0o700 if tpm else 0o711)  # QEMU is given the files, not their folders
        self._made.append(folder)
        if tpm:
            _owned(folder, folder, tpm=True)


def _owned(new: Path, place: Path, *, tpm: bool) -> None:
    """As what was there; libvirt itself gives NVRAM to QEMU, and a TPM's folder but not its files
    to the TPM's program."""
    if place.exists() and place != new:
        before = place.stat()
        os.chown(new, before.st_uid, before.st_gid)
    elif tpm:
        for user in _TPM_USERS:
            with suppress(KeyError):
                found = pwd.getpwnam(user)
                os.chown(new, found.pw_uid, found.pw_gid)
                return
