"""The spool: per snapshot, a locked directory for captured memory that is not stored yet."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.capture.memory import image
from vmckpt.errors import GuestLocked
from vmckpt.units import Seconds

_TURN = Seconds(0.1)


@contextmanager
def held(folder: Path, *, patience: Seconds) -> Iterator[int]:
    """Hold the lock of a directory, such as a snapshot's, during the block. Yields its descriptor.

    A process that inherits the descriptor holds the lock until it closes the descriptor.
    `patience`: how long to wait for the lock. Raises GuestLocked, OSError.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder.with_suffix(".lock")
    file = _taken(path, patience, folder.name)
    try:
        yield file
    finally:
        # Unlinked while locked: a process that waits for the lock finds that the path has changed.
        path.unlink(missing_ok=True)
        os.close(file)


def sweep(spool: Path) -> None:
    """Remove captured memory left by dead agents, unless an undo process still holds its lock.

    Without a journal, no other command removes such memory. The guest itself is not changed; that
    is the task of `vmckpt recover`.
    """
    for folder in spool.glob("s-*"):
        if folder.is_dir():
            with suppress(GuestLocked, OSError), held(folder, patience=Seconds(0.0)):
                image.remove(folder)


def _taken(path: Path, patience: Seconds, what: str) -> int:
    """Lock the lock file at `path`. Returns its file descriptor.

    `patience`: maximum wait; `what`: name of the directory, for the error. Raises GuestLocked,
    OSError.
    """
    give_up = time.monotonic() + patience
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locked(file) and _named(file, path):
            return file
        os.close(file)
        if time.monotonic() > give_up:
            raise GuestLocked(f"{what} is locked by another agent", hint="try again in a minute")
        time.sleep(_TURN)


def _named(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
