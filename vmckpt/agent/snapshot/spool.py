"""Where captured memory waits to be stored: one folder for each snapshot, one agent at a time."""

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
    """Be the only agent at a snapshot, as long as the process lives; the lock's file, which other
    processes may hold open for longer. Raises GuestLocked, OSError."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder.with_suffix(".lock")
    file = _taken(path, patience, folder.name)
    try:
        yield file
    finally:
        # Still locked: who waits for it finds that the name is another file's by then.
        path.unlink(missing_ok=True)
        os.close(file)


def sweep(spool: Path) -> None:
    """Remove captured memory that a dead agent has left, where no keeper is at it either: without
    a journal nobody else comes. Only that; its guest is put back by `vmckpt recover`."""
    for folder in spool.glob("s-*"):
        if folder.is_dir():
            with suppress(GuestLocked, OSError), held(folder, patience=Seconds(0.0)):
                image.remove(folder)


def _taken(path: Path, patience: Seconds, what: str) -> int:
    """A lock file that is locked, and is the one of that name."""
    give_up = time.monotonic() + patience
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locked(file) and _named(file, path):
            return file
        os.close(file)
        if time.monotonic() > give_up:
            raise GuestLocked(f"another agent is still at {what}", hint="try again in a minute")
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
