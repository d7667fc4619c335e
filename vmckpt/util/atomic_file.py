"""Small files that are replaced atomically: after a crash they are complete, old or new."""

import os
from pathlib import Path


def put(path: Path, text: str, *, private: bool = False, for_good: bool = False) -> None:
    """Replace a file's content atomically.

    `private`: only the file's owner may read a new file. `for_good`: the content survives a loss of
    power once this returns. Raises OSError.
    """
    new = path.with_name(f"{path.name}.new")
    mode = 0o600 if private else 0o666
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(new, flags, mode)
    with os.fdopen(file, "w") as out:
        out.write(text)
        if for_good:
            out.flush()
            os.fsync(out.fileno())
    new.rename(path)
    if for_good:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
