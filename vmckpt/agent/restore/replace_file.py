"""A file that takes another one's place: made beside it, and put there in one go.

Its directory may be another user's; see `util.host_files`.
"""

import os
from pathlib import Path

from vmckpt.errors import BadInput
from vmckpt.util.host_files import Folder, as_before, hold_path


def paths(place: Path, snapshot: str) -> tuple[Path, Path]:
    """What a file is called until it is in its place, and what was there before, after that."""
    return Path(f"{place}.{snapshot}.new"), Path(f"{place}.{snapshot}.old")


def is_there(path: Path) -> bool:
    """Whether anything is, a link that leads nowhere among it."""
    return os.path.lexists(path)


def mark(path: Path) -> str:
    """The inode of a file and its time of the last write: changes when either does."""
    return _mark(path.lstat())


def _mark(seen: os.stat_result) -> str:
    return f"{seen.st_ino}:{seen.st_mtime_ns}"


def check_destination(place: Path, snapshot: str, *, replace: bool) -> None:
    """Raises BadInput if a file may not be put there."""
    aside = paths(place, snapshot)[1]
    if is_there(aside):
        raise BadInput(
            f"{aside} is what an interrupted restore has put aside",
            hint="run vmckpt recover; if it stays, move it away",
        )
    if is_there(place) and not replace:
        raise BadInput(
            f"{place} is there already",
            hint="say --replace to write over it, or choose another name or folder",
        )


def remove(path: Path) -> None:
    """Fine if nothing is there, or its directory is missing. Raises OSError."""
    if is_there(path):
        with Folder(path.parent) as folder:
            folder.remove(path.name)


def rename(path: Path, place: Path) -> None:
    """Within one directory. Raises OSError."""
    with Folder(path.parent) as folder:
        folder.rename(path.name, place.name)


class Replacement:
    """One such file. Call `create`, write to it, `swap`, and then `keep` or `take_back`."""

    def __init__(self, place: Path, snapshot: str) -> None:
        """Raises OSError."""
        self.place = place
        self._name = place.name
        self._new, self._aside = (one.name for one in paths(place, snapshot))
        self._folder = Folder(place.parent)
        self._file = -1
        self._swapped = False

    def close(self) -> None:
        """Nothing else works afterwards."""
        self._folder.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def create(self) -> int:
        """The new file, open to be read and written until `close`. Raises OSError."""
        self._file = self._folder.renew(self._new)
        return self._file

    def mark(self) -> str:
        """As `mark`, of the new file. Raises OSError."""
        return _mark(os.fstat(self._opened()))

    def swap(self, owner: tuple[int, int] | None = None) -> None:
        """Put it in its place; what is there is put aside, and gives it owner and permissions.

        `owner`: where nothing is; None: ours. Raises OSError.
        """
        self._swapped = True
        if self._folder.look(self._name) is not None:
            with hold_path(self.place) as before:
                as_before(self._opened(), os.fstat(before))
            self._folder.rename(self._name, self._aside)
        elif owner is not None:
            os.fchown(self._opened(), *owner)
        self._folder.rename(self._new, self._name)

    def keep(self) -> None:
        """It is in use: what was put aside goes. Raises OSError."""
        if self._swapped:
            self._swapped = False
            self._folder.remove(self._aside)

    def take_back(self) -> None:
        """As before `create`, unless it is kept. May be repeated. Raises OSError."""
        if self._swapped:
            if self._folder.look(self._aside) is not None:
                self._folder.rename(self._aside, self._name)
            elif self._folder.look(self._new) is None:
                self._folder.remove(self._name)  # it is ours, and nothing was there before
            self._swapped = False
        self._folder.remove(self._new)

    def _opened(self) -> int:
        if self._file < 0:
            self._file = self._folder.open(self._new, os.O_RDWR)
        return self._file
