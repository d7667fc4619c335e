"""What other users of this machine can read of our processes."""

import os
from contextlib import suppress
from pathlib import Path


def command_lines(session: int | None = None) -> dict[int, bytes]:
    """Each process' command line, as `ps` shows it to everybody; of one session, or of all."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(folder.name)
            if session is None or os.getsid(pid) == session:
                found[pid] = (folder / "cmdline").read_bytes()
    return found


def environment(pid: int) -> bytes:
    """A process' environment, which its own user alone can read."""
    return Path(f"/proc/{pid}/environ").read_bytes()
