"""Directories on a host that no other user can create or change.

Small files are in /run/vmckpt, which only root can create. Copies of guest memory need more space
than /run has, so they are in a directory on /dev/shm. All users may create directories there.
Therefore the directory has a random name, and a link in /run/vmckpt points to the directory.
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
    """Create a directory below /run/vmckpt if it is missing, and verify it. Returns its path.

    `names`: the levels of the path; without names, the directory is /run/vmckpt. Other users may
    traverse the directory, because QEMU must reach its sockets there. They may not list or change
    the directory. Raises RemoteError if another user can change it, OSError.
    """
    path = RUN
    for name in ("", *names):
        path = path / name
        with suppress(FileExistsError):
            path.mkdir(mode=0o711)
        verify(path)  # before anything is created in the directory
    return path


def require_own_directory() -> None:
    """Check /run/vmckpt, if it exists, before an operation begins.

    Raises RemoteError if another user created or can change /run/vmckpt, and OSError.
    """
    if RUN.is_symlink() or RUN.exists():
        verify(RUN)


def check_state(path: Path) -> None:
    """Check an agent's directory on a disk. The directory need not exist yet.

    The path may contain links that root or this process's user created. Raises RemoteError if
    another user can create or change the directory, OSError.
    """
    while not os.path.lexists(path):
        path = path.parent
    try:
        Folder(path, only_ours=True).close()
    except FileRefused as exc:
        raise _refused(exc.where, exc.why) from exc


def memory_dir(*names: str) -> Path:
    """Create and verify a directory for copies of guest memory, on tmpfs with mode 0700.

    `names`: the levels of the path below the random directory. Returns the path. Raises RemoteError
    if another user can change the directory, OSError.
    """
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
    """Check a directory and its parents.

    Raises RemoteError if one of them is not a directory, or if another user can change one of them;
    OSError.
    """
    for one in (path, *path.parents):
        seen = one.lstat()
        if not stat.S_ISDIR(seen.st_mode):
            raise _refused(one, "is not a directory")
        if why := others_may_change(seen, last=one == path):
            raise _refused(one, why)


def _refused(path: Path, why: str) -> RemoteError:
    return RemoteError(
        f"{os.uname().nodename}: {path} {why}, so it is not safe for files that root uses",
        hint=f"check {path} with ls -ld, then correct its owner and mode, or remove it if nothing"
        " needs it",
    )
