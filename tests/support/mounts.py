"""File systems that a test mounts."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(at: Path, kind: str, options: str, source: Path | None) -> Iterator[None]:
    at.mkdir()
    if source is None:
        subprocess.run(["mount", "-t", kind, "-o", options, kind, at], check=True)
    else:
        subprocess.run(["mount", "--bind", source, at], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)
