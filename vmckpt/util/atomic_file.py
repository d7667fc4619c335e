"""Atomic replacement of small files: after a crash, the old or the new content is complete."""

import os
from pathlib import Path


def put(path: Path, text: str, *, private: bool = False, for_good: bool = False) -> None:
    """Replace a file's content atomically.

    `private`: a new file can be read only by its owner. `for_good`: once this function has
    returned, the content survives a power failure. Raises OSError.
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
    """Sync a directory, so that its entries survive a power failure. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
