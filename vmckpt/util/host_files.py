"""Files in directories that another user may own, such as a directory of images or of NVRAM.

That user can replace any name there, at any moment, by a symbolic link, a FIFO or another file. A
directory is therefore opened once, level by level, and every name is relative to its file
descriptor. A file of ours is created as a new one, and its owner and mode are changed through its
file descriptor. Other programs get the open file, as a path that no user can redirect.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

_MOST_TURNS = 256
"""Levels and links of one path; the kernel follows 40 links."""
_LEVEL = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_THING = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PERMISSIONS = 0o666
"""All that an image or a small file may be given: it is no program, whatever was there before."""


class FileRefused(OSError):
    """Another user made what is there, or it is no regular file."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.ELOOP, why, str(path))
        self.where, self.why = path, why
        """What is refused; the error's own path is the one that was asked for."""
        self.hint = f"find out which user made it (ls -ld {path}), and remove it"


class Folder:
    """A directory that is held open. Use as `with Folder(path) as folder`, or close it.

    A symbolic link on the way is followed only if root or our own user made it. All methods raise
    OSError.
    """

    def __init__(self, path: Path, *, make: bool = False, only_ours: bool = False) -> None:
        """`make`: create what is missing, with mode 0711. `only_ours`: Refused if others can change
        it, or any directory on the way, also of those to which links lead."""
        self.path = path
        self._file = _walked(os.open("/", _LEVEL), path, path, make=make, only_ours=only_ours)

    @classmethod
    def below(cls, folder: Path, inside: str) -> Self:
        """A directory inside another one, whose own path may have links of any user: it is the
        operator's choice."""
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
        """May be repeated; nothing else works afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def look(self, name: str) -> os.stat_result | None:
        """What is there, if anything; of a symbolic link the link itself."""
        with suppress(FileNotFoundError), _named(self.path / name):
            return os.stat(name, dir_fd=self._file, follow_symlinks=False)
        return None

    def create(self, name: str, mode: int = 0o600) -> int:
        """A new file, to be read and written. FileExistsError if anything is there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
        with _named(self.path / name):
            return os.open(name, flags, mode, dir_fd=self._file)

    def renew(self, name: str) -> int:
        """The same, instead of what an earlier process of ours left there."""
        self.remove(name)
        return self.create(name)

    def write(self, name: str, content: bytes) -> None:
        """The same with that content, which is on the disk then."""
        with os.fdopen(self.renew(name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A regular file that is there. Refused for a symbolic link, a FIFO or anything else."""
        try:
            with _named(self.path / name):
                file = os.open(name, flags | _FILE, dir_fd=self._file)
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO or socket
                raise
            raise FileRefused(self.path / name, "is no regular file") from exc
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileRefused(self.path / name, "is no regular file")
        return file

    def read(self, name: str, most: int) -> bytes:
        """The first bytes of a regular file that is there."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(most)

    def hold(self, name: str) -> int:
        """Whatever is there, without opening it; of a symbolic link the link itself."""
        with _named(self.path / name):
            return os.open(name, _THING, dir_fd=self._file)

    def remove(self, name: str) -> None:
        """Fine if nothing is there."""
        with suppress(FileNotFoundError), _named(self.path / name):
            os.unlink(name, dir_fd=self._file)

    def rename(self, old: str, new: str, to: "Folder | None" = None) -> None:
        """What is at `new` goes. `to`: the directory of `new`; None: this one."""
        with _named(self.path / old):
            os.rename(old, new, src_dir_fd=self._file, dst_dir_fd=(to or self)._file)

    def link(self, old: str, new: str, to: "Folder") -> None:
        """Give a file a second name. FileExistsError if anything has it."""
        places = {"src_dir_fd": self._file, "dst_dir_fd": to._file}
        with _named(self.path / old):
            os.link(old, new, **places, follow_symlinks=False)

    def make(self, name: str, mode: int) -> "Folder":
        """A new directory in it. FileExistsError if anything is there."""
        made = Folder.__new__(Folder)
        made.path = self.path / name
        with _named(made.path):
            os.mkdir(name, mode, dir_fd=self._file)
            made._file = os.open(name, _LEVEL, dir_fd=self._file)
        return made

    def drop(self, name: str) -> None:
        """Remove an empty directory in it."""
        with _named(self.path / name):
            os.rmdir(name, dir_fd=self._file)

    def give(self, user: int, group: int) -> None:
        """Change its owner."""
        with _named(self.path):
            os.chown(path_of(self._file), user, group)

    def sync(self) -> None:
        """See that its names outlive a loss of power."""
        with self.listed() as file:
            os.fsync(file)

    @contextmanager
    def listed(self) -> Iterator[int]:
        """A file descriptor of it to list it and to open what is in it."""
        with _named(self.path):
            file = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._file)
        try:
            yield file
        finally:
            os.close(file)


def path_of(file: int) -> str:
    """An open file as a path, for this process and for those that inherit the descriptor."""
    return f"/proc/self/fd/{file}"


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that is there; links are followed as by `Folder`. Raises OSError."""
    folder, name = _parent(path)
    with folder:
        return folder.open(name, flags)


@contextmanager
def hold_path(path: Path) -> Iterator[int]:
    """Hold what is there without opening it, for its state and its owner. Raises OSError."""
    folder, name = _parent(path)
    with folder:
        file = folder.hold(name)
    try:
        yield file
    finally:
        os.close(file)


def as_before(file: int, before: os.stat_result) -> None:
    """Give a file the owner of another one, and its permissions but for those of a program.

    Raises OSError.
    """
    os.fchmod(file, before.st_mode & _PERMISSIONS)
    os.fchown(file, before.st_uid, before.st_gid)


def is_ours(seen: os.stat_result) -> bool:
    """Whether root or our own user made it."""
    return seen.st_uid in (0, os.geteuid())


def others_may_change(seen: os.stat_result, *, last: bool) -> str | None:
    """Why others can change a directory or what of ours is in it; None: they cannot.

    `last`: the path ends there, so that they may not put anything of theirs into it either.
    """
    if not is_ours(seen):
        return f"belongs to user {seen.st_uid}"
    # In a sticky directory nobody can rename or remove what is ours.
    if seen.st_mode & _OTHERS_WRITE and (last or not seen.st_mode & stat.S_ISVTX):
        return "can be written by others"
    return None


def _walked(
    at: int, inside: Path, path: Path, *, make: bool = False, only_ours: bool = False
) -> int:
    """The directory `inside` of the one that is open as `at`, which is closed. `path`: for errors.

    Raises OSError.
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
        raise FileRefused(path, "leads over too many links")
    except BaseException:
        os.close(at)
        raise


def _step(at: int, left: list[str], path: Path, *, make: bool) -> int:
    """Go one level down, or replace a link by where it leads. The directory that is open then."""
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
    """Where a symbolic link leads. Raises NotADirectoryError; FileRefused if it is another's."""
    link = os.open(name, _THING, dir_fd=at)
    try:
        seen = os.fstat(link)
        if not stat.S_ISLNK(seen.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not is_ours(seen):
            raise FileRefused(path, f"leads over a symbolic link of user {seen.st_uid}, {name}")
        return Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def _parent(path: Path) -> tuple[Folder, str]:
    """Where a file is, and its name there: no link, or one that `Folder.open` refuses."""
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
    raise FileRefused(path, "leads over too many links")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the whole path, not the name in a directory that is open."""
    try:
        yield
    except OSError as exc:
        exc.filename = str(path)
        raise
