"""What is on the disk for good."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """See that the names in a folder outlive a loss of power. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
