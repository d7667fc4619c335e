"""Files in directories that another user may own, such as directories for images or NVRAM.

The other user can at any moment replace any name in the directory with a symbolic link, a FIFO or
another file. Therefore a directory is opened once, level by level, and all names are relative to
the directory's file descriptor. vmckpt always creates new files. It changes owner and mode through
the file descriptor. Other tools access an open file through a path that no user can redirect.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

_MOST_TURNS = 256
"""Maximum number of levels and links in a path. The kernel follows at most 40 links."""
_LEVEL = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_THING = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PERMISSIONS = 0o666
"""Maximum permissions for images and small files. These files never become executable."""


class FileRefused(OSError):
    """A path is refused: another user owns or can change a part of it, it has too many links, or
    the file is not a regular file.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.ELOOP, why, str(path))
        self.where, self.why = path, why
        """The refused path, and the reason. `filename` is the path that was requested."""
        self.hint = (
            f"check {path} with ls -ld, then correct its owner and mode, or remove it if nothing"
            " needs it"
        )


class Folder:
    """An open directory. Use it as `with Folder(path) as folder`, or close it after use.

    A symbolic link on the path is followed only if root or this process's user created it. All
    methods raise OSError.
    """

    def __init__(self, path: Path, *, make: bool = False, only_ours: bool = False) -> None:
        """Open a directory.

        `make`: create missing levels, with mode 0711. `only_ours`: raise FileRefused if other users
        can change the directory or any directory on the path, including the targets of links.
        Raises OSError.
        """
        self.path = path
        self._file = _walked(os.open("/", _LEVEL), path, path, make=make, only_ours=only_ours)

    @classmethod
    def below(cls, folder: Path, inside: str) -> Self:
        """Open a directory inside `folder`.

        The operator has chosen the path `folder`, so it may contain links owned by any user.
        Raises FileRefused, OSError.
        """
        made = cls.__new__(cls)
        made.path = folder / inside
        at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        made._file = _walked(at, Path(inside), made.path)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory. May be called more than once. Other methods fail afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def look(self, name: str) -> os.stat_result | None:
        """Return a file's status; None if the file does not exist. Does not follow links."""
        with suppress(FileNotFoundError), _named(self.path / name):
            return os.stat(name, dir_fd=self._file, follow_symlinks=False)
        return None

    def create(self, name: str, mode: int = 0o600) -> int:
        """Create a file for reading and writing. Returns its file descriptor.

        Raises FileExistsError if the name exists.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
        with _named(self.path / name):
            return os.open(name, flags, mode, dir_fd=self._file)

    def renew(self, name: str) -> int:
        """Remove an existing file with this name, and create a new file. Returns its descriptor."""
        self.remove(name)
        return self.create(name)

    def write(self, name: str, content: bytes) -> None:
        """Create a file as in `renew`, write its content, and sync the file to disk."""
        with os.fdopen(self.renew(name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open an existing regular file. Returns its file descriptor.

        Raises FileRefused for a symbolic link, a FIFO or any other kind of file.
        """
        try:
            with _named(self.path / name):
                file = os.open(name, flags | _FILE, dir_fd=self._file)
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO or socket
                raise
            raise FileRefused(self.path / name, "is not a regular file") from exc
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileRefused(self.path / name, "is not a regular file")
        return file

    def read(self, name: str, most: int) -> bytes:
        """Return the first bytes of an existing regular file, at most `most`.

        Raises FileRefused for any other kind of file, OSError.
        """
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(most)

    def hold(self, name: str) -> int:
        """Open any kind of file with O_PATH. Returns its descriptor. Does not follow links."""
        with _named(self.path / name):
            return os.open(name, _THING, dir_fd=self._file)

    def remove(self, name: str) -> None:
        """Remove a file. Does nothing if the file does not exist."""
        with suppress(FileNotFoundError), _named(self.path / name):
            os.unlink(name, dir_fd=self._file)

    def rename(self, old: str, new: str, to: "Folder | None" = None) -> None:
        """Rename a file, replacing `new` if it exists.

        `to`: the directory of `new`; None: this directory. Raises OSError.
        """
        with _named(self.path / old):
            os.rename(old, new, src_dir_fd=self._file, dst_dir_fd=(to or self)._file)

    def link(self, old: str, new: str, to: "Folder") -> None:
        """Create a hard link to a file. Raises FileExistsError if the new name exists."""
        places = {"src_dir_fd": self._file, "dst_dir_fd": to._file}
        with _named(self.path / old):
            os.link(old, new, **places, follow_symlinks=False)

    def make(self, name: str, mode: int) -> "Folder":
        """Create and open a subdirectory. Raises FileExistsError if the name exists."""
        made = Folder.__new__(Folder)
        made.path = self.path / name
        with _named(made.path):
            os.mkdir(name, mode, dir_fd=self._file)
            made._file = os.open(name, _LEVEL, dir_fd=self._file)
        return made

    def drop(self, name: str) -> None:
        """Remove an empty subdirectory."""
        with _named(self.path / name):
            os.rmdir(name, dir_fd=self._file)

    def give(self, user: int, group: int) -> None:
        """Change the directory's owner and group."""
        with _named(self.path):
            os.chown(path_of(self._file), user, group)

    def sync(self) -> None:
        """Sync the directory, so that its entries survive a power failure."""
        with self.listed() as file:
            os.fsync(file)

    @contextmanager
    def listed(self) -> Iterator[int]:
        """Provide a file descriptor for listing the directory and opening files in it."""
        with _named(self.path):
            file = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._file)
        try:
            yield file
        finally:
            os.close(file)


def path_of(file: int) -> str:
    """Return a path to an open file, valid in processes that have or inherit the descriptor."""
    return f"/proc/self/fd/{file}"


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open an existing regular file. Follows the same links as `Folder`.

    Returns the file descriptor. Raises OSError, FileRefused.
    """
    folder, name = _parent(path)
    with folder:
        return folder.open(name, flags)


@contextmanager
def hold_path(path: Path) -> Iterator[int]:
    """Provide an O_PATH descriptor for any kind of file, to access its status and owner.

    Raises OSError.
    """
    folder, name = _parent(path)
    with folder:
        file = folder.hold(name)
    try:
        yield file
    finally:
        os.close(file)


def as_before(file: int, before: os.stat_result) -> None:
    """Set a file's owner and permissions as in `before`, but never permission to execute.

    Raises OSError.
    """
    os.fchmod(file, before.st_mode & _PERMISSIONS)
    os.fchown(file, before.st_uid, before.st_gid)


def is_ours(seen: os.stat_result) -> bool:
    """Return whether root or this process's user owns a file."""
    return seen.st_uid in (0, os.geteuid())


def others_may_change(seen: os.stat_result, *, last: bool) -> str | None:
    """Return why other users can change a directory or vmckpt's files in it; None if they cannot.

    `last`: this is the last directory of the path, so other users must not be able to add files.
    """
    if not is_ours(seen):
        return f"belongs to user {seen.st_uid}"
    # In a directory with the sticky bit, no other user can rename or remove our files.
    if seen.st_mode & _OTHERS_WRITE and (last or not seen.st_mode & stat.S_ISVTX):
        return "is writable by other users"
    return None


def _walked(
    at: int, inside: Path, path: Path, *, make: bool = False, only_ours: bool = False
) -> int:
    """Open the directory `inside`, relative to the open directory `at`, and close `at`.

    `path`: the path for error messages. `make`, `only_ours`: see Folder. Returns the descriptor.
    Raises OSError, FileRefused.
    """
    left = list(reversed(inside.parts))
    try:
        with _named(path):
            for _ in range(_MOST_TURNS):
                if only_ours and (why := others_may_change(os.fstat(at), last=not left)):
                    raise FileRefused(Path(path_of(at)).readlink(), why)
                if not left:
                    return at
                at = _step(at, left, path, make=make)
        raise FileRefused(path, "has too many links in its path")
    except BaseException:
        os.close(at)
        raise


def _step(at: int, left: list[str], path: Path, *, make: bool) -> int:
    """Open the next level, or replace a link with its target. Returns the directory now open.

    `at`: the open directory; `left`: the remaining levels, the next one last. `make`: create a
    missing level.
    """
    name = left.pop()
    try:
        below = os.open(name, _LEVEL, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, 0o711, dir_fd=at)
        left.append(name)
        return at
    except NotADirectoryError:
        left.extend(reversed(_target(at, name, path).parts))
        return at
    os.close(at)
    return below


def _target(at: int, name: str, path: Path) -> Path:
    """Return the target of a symbolic link.

    Raises NotADirectoryError if `name` is not a link, FileRefused if another user owns the link.
    """
    link = os.open(name, _THING, dir_fd=at)
    try:
        seen = os.fstat(link)
        if not stat.S_ISLNK(seen.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not is_ours(seen):
            raise FileRefused(
                path, f"leads through a symbolic link owned by user {seen.st_uid}: {name}"
            )
        return Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def _parent(path: Path) -> tuple[Folder, str]:
    """Follow the links from a path to a file. Returns the file's open directory and name.

    Raises FileRefused, OSError.
    """
    for _ in range(_MOST_TURNS):
        folder = Folder(path.parent)
        try:
            seen = folder.look(path.name)
            if seen is None or not stat.S_ISLNK(seen.st_mode):
                return folder, path.name
            target = _target(folder._file, path.name, path)
        except BaseException:
            folder.close()
            raise
        folder.close()
        path = path.parent / target
    raise FileRefused(path, "has too many links in its path")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make errors show the complete path, not a name relative to an open directory."""
    try:
        yield
    except OSError as exc:
        exc.filename = str(path)
        raise
