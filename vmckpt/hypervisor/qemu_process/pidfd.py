"""A process held by a pidfd, so that a later process with the same ID is never meant."""

import os
import select
import signal
from contextlib import suppress
from typing import Self


class HeldProcess:
    """Use as `with HeldProcess(pid) as process`, or close it."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """May be repeated; nothing else works afterwards."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def lives(self) -> bool:
        """Whether it has not ended. If so, all that was read from /proc/PID before is its own."""
        return not self.ended(0.0)

    def ended(self, within: float) -> bool:
        """Wait up to `within` seconds for its end; whether it has ended."""
        return bool(select.select([self.pidfd], [], [], within)[0])

    def end(self, within: float) -> bool:
        """Send SIGKILL and wait up to `within` seconds for its end; whether it has ended."""
        self.kill()
        return self.ended(within)

    def kill(self) -> None:
        """Send SIGKILL; fine if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
