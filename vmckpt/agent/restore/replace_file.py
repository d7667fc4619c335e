"""Replace a file atomically: create the new file next to it, then swap both.

The directory may belong to another user; see `util.host_files`.
"""

import os
from pathlib import Path

from vmckpt.errors import BadInput
from vmckpt.units import Bytes
from vmckpt.util.host_files import Folder, as_before, hold_path


def paths(place: Path, snapshot: str) -> tuple[Path, Path]:
    """Return the temporary path of the new file, and the path at which the old file is kept."""
    return Path(f"{place}.{snapshot}.new"), Path(f"{place}.{snapshot}.old")


def is_there(path: Path) -> bool:
    """Return whether a file exists; a broken symbolic link counts, too."""
    return os.path.lexists(path)


def mark(path: Path) -> str:
    """Return a file's mark: its inode number and its time of last modification. Raises OSError."""
    return _mark(path.lstat())


def _mark(seen: os.stat_result) -> str:
    return f"{seen.st_ino}:{seen.st_mtime_ns}"


def check_destination(place: Path, snapshot: str, *, replace: bool) -> None:
    """Check that a restore may create or, with `replace`, overwrite a file. Raises BadInput."""
    aside = paths(place, snapshot)[1]
    if is_there(aside):
        raise BadInput(
            f"{aside} was left by an interrupted restore",
            hint="run vmckpt recover; if the file still exists, move it away",
        )
    if is_there(place) and not replace:
        raise BadInput(
            f"{place} already exists",
            hint="overwrite it with --replace, or choose another name or directory",
        )


def remove(path: Path) -> None:
    """Remove a file if it and its directory exist. Raises OSError."""
    if is_there(path):
        with Folder(path.parent) as folder:
            folder.remove(path.name)


def rename(path: Path, place: Path) -> None:
    """Rename a file within its directory. Raises OSError."""
    with Folder(path.parent) as folder:
        folder.rename(path.name, place.name)


class Replacement:
    """The replacement of one file.

    Call `create`, write to the new file, then call `swap`, and finally `keep` or `take_back`.
    """

    def __init__(self, place: Path, snapshot: str) -> None:
        """`place`: path of the file; `snapshot`: ID used in temporary names. Raises OSError."""
        self.place = place
        self._name = place.name
        self._new, self._aside = (one.name for one in paths(place, snapshot))
        self._folder = Folder(place.parent)
        self._file = -1
        self._swapped = False

    def close(self) -> None:
        """Close the files. No other method may be called afterwards."""
        self._folder.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def create(self) -> int:
        """Create the new file. Returns its descriptor, open until `close`. Raises OSError."""
        self._file = self._folder.renew(self._new)
        return self._file

    def mark(self) -> str:
        """Return the mark of the new file. Raises OSError."""
        return _mark(os.fstat(self._opened()))

    def allocated(self) -> Bytes:
        """Return the space that the new file takes. Raises OSError."""
        return Bytes(os.fstat(self._opened()).st_blocks * 512)

    def swap(self, owner: tuple[int, int] | None = None) -> None:
        """Move the old file aside and the new file into its place. Raises OSError.

        The new file gets the owner and permissions of the old file. `owner`: user and group if
        there is no old file; None: those of this process.
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
        """Remove the old file, since the new file is in use. Raises OSError."""
        if self._swapped:
            self._swapped = False
            self._folder.remove(self._aside)

    def take_back(self) -> None:
        """Restore the state before `create`, unless `keep` was called; may be repeated.

        Raises OSError.
        """
        if self._swapped:
            if self._folder.look(self._aside) is not None:
                self._folder.rename(self._aside, self._name)
            elif self._folder.look(self._new) is None:
                self._folder.remove(self._name)  # the new file, which replaced nothing
            self._swapped = False
        self._folder.remove(self._new)

    def _opened(self) -> int:
        if self._file < 0:
            self._file = self._folder.open(self._new, os.O_RDWR)
        return self._file
