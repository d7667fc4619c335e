"""Restart a watchdog that is gone: the agent and its watchdog monitor each other."""

import threading
from collections.abc import Callable
from contextlib import suppress

from vmckpt.errors import VmckptError
from vmckpt.lease.clock import boottime
from vmckpt.replication.watchdog.shared_page import WatchdogPage

_UNGUARDED = 1.0
"""A watchdog that has not run a cycle for this long, in seconds, is restarted."""


class WatchdogRestart:
    """Restarts the watchdog in a thread: on a busy host, a restart may take many seconds, and the
    lease must be renewed meanwhile."""

    def __init__(self, page: WatchdogPage, begin: Callable[[], None]) -> None:
        """`begin` starts the watchdog unless it is running; it may raise VmckptError."""
        self._page, self._begin = page, begin
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Restart the watchdog if it has not run a cycle for a second. Call this regularly."""
        looks = boottime() - self._page.guarded <= _UNGUARDED
        if looks or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._start, name="watchdog", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        # The next call to `look` tries again. OSError: for example, at the process limit.
        with suppress(VmckptError, OSError):
            self._begin()
