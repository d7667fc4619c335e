"""Refer to a process by a pidfd, so that a later process with the same ID is never affected."""

import os
import select
import signal
from contextlib import suppress
from typing import Self


class HeldProcess:
    """A process held by its pidfd. Use as `with HeldProcess(pid) as process`, or call `close`."""

    def __init__(self, pid: int) -> None:
        """Open a pidfd. Raises ProcessLookupError if there is no such process."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the pidfd. May be called again; all other methods fail afterwards."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def lives(self) -> bool:
        """Return whether the process is still alive.

        If it is alive, everything read from /proc/PID before was about this process.
        """
        return not self.ended(0.0)

    def ended(self, within: float) -> bool:
        """Wait up to `within` seconds for the process to exit. Returns whether it has exited."""
        return bool(select.select([self.pidfd], [], [], within)[0])

    def end(self, within: float) -> bool:
        """Send SIGKILL and wait up to `within` seconds. Returns whether the process has exited."""
        self.kill()
        return self.ended(within)

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if the process has exited."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
