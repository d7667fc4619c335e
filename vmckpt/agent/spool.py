"""Where captured memory waits to be stored: one folder for each snapshot, one agent at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import GuestBusy
from vmckpt.units import Seconds

_TURN = Seconds(0.1)


@contextmanager
def held(folder: Path, *, patience: Seconds) -> Iterator[None]:
    """Be the only agent at a snapshot, as long as the process lives. Raises GuestBusy, OSError."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder.with_suffix(".lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up = time.monotonic() + patience
        while not _locked(file):
            if time.monotonic() > give_up:
                raise GuestBusy(
                    f"another agent is still at {folder.name}", mend="try again in a minute"
                )
            time.sleep(_TURN)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
