"""Directories on a host that no other user can have made or can change.

Small files are in /run/vmckpt, which only root can make. Copies of a guest's memory need more room
than /run has and are in a directory on /dev/shm, where everybody may make directories: its name is
random, and a link in /run/vmckpt says which one it is.
"""

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import RemoteError
from vmckpt.util.host_files import FileRefused, Folder, others_may_change

RUN = Path("/run/vmckpt")
SHM = Path("/dev/shm")
_MEMORY = "memory"


def run_dir(*names: str) -> Path:
    """Make /run/vmckpt/NAME/... if it is missing, and verify it.

    Others may traverse it, since QEMU must reach its sockets there; nobody else may list or change
    it. Raises RemoteError if it is not ours alone, OSError.
    """
    path = RUN
    for name in ("", *names):
        path = path / name
        with suppress(FileExistsError):
            path.mkdir(mode=0o711)
        verify(path)  # before anything is made in it
    return path


def require_own_directory() -> None:
    """Raises RemoteError, before anything is begun, if another user made /run/vmckpt."""
    if RUN.is_symlink() or RUN.exists():
        verify(RUN)


def check_state(path: Path) -> None:
    """Raises RemoteError if another user can change, or make, an agent's directory on a disk.

    Links that root made may lead there. Raises OSError.
    """
    while not os.path.lexists(path):
        path = path.parent
    try:
        Folder(path, only_ours=True).close()
    except FileRefused as exc:
        raise _refused(exc.where, exc.why) from exc


def memory_dir(*names: str) -> Path:
    """The same for copies of guest memory, on tmpfs and for us alone."""
    path = _memory_root()
    for name in names:
        verify(path)
        path = path / name
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    verify(path)
    return path


def _memory_root() -> Path:
    run = run_dir()
    lock = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link = run / _MEMORY
        if link.is_symlink() and link.is_dir():
            return link.readlink()
        made = Path(tempfile.mkdtemp(prefix="vmckpt-", dir=SHM))
        link.unlink(missing_ok=True)
        link.symlink_to(made)
        return made
    finally:
        os.close(lock)


def verify(path: Path) -> None:
    """Raises RemoteError if others may change what is at that path, OSError."""
    for one in (path, *path.parents):
        seen = one.lstat()
        if not stat.S_ISDIR(seen.st_mode):
            raise _refused(one, "is not a directory")
        if why := others_may_change(seen, last=one == path):
            raise _refused(one, why)


def _refused(path: Path, why: str) -> RemoteError:
    return RemoteError(
        f"{os.uname().nodename}: {path} {why}, so nothing that is run as root may be kept there",
        hint=f"find out who made it (ls -ld {path}), and remove it",
    )
