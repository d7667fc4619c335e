"""Resume a guest that its agent left paused in the middle of an epoch.

The watchdog does this in a process that it forks from itself: on a host whose processors are busy
a new agent takes seconds to start, and the guest would be paused for as long. What the guest has
sent stays buffered. So only the epoch under way is lost, of which nothing was released; the
standby's last epoch is still the one that all released output belongs to.
"""

import fcntl
from contextlib import suppress
from pathlib import Path

from vmckpt.capture import migration_settings
from vmckpt.capture.migration_settings import Undo
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.disks.log_control import Control
from vmckpt.replication.watchdog.facts import Resumable
from vmckpt.replication.watchdog.shared_page import WatchdogPage


def resume(facts: Resumable, page: WatchdogPage) -> bool:
    """Undo what an epoch has changed in QEMU, and resume the guest, as a new agent would.

    Returns False if an agent is working with the guest, which then does it itself.
    Raises VmckptError, OSError, ValueError: the guest may still be paused.
    """
    with Path(facts.lock).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if page.stopped == 0:
            return True  # an agent came, undid it and went
        with QmpMonitor(facts.guest, host=facts.host, uri=facts.uri) as monitor:
            migration_settings.break_off(monitor, Undo.from_json(facts.undo))
        _bound_logs(facts)
        page.stopped = 0.0
        return True


def _bound_logs(facts: Resumable) -> None:
    """Make writes wait when the logs are full, until an agent empties them."""
    for path in facts.logs:
        with suppress(OSError, ValueError), Control(Path(path)) as control:
            control.never_wait = False
