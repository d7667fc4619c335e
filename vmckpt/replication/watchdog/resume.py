"""Resume a guest that its agent left paused in the middle of an epoch.

The watchdog does this in a process that it forks: on a busy host, a new agent takes seconds to
start, and the guest would stay paused meanwhile. The guest's output stays buffered. So only the
current epoch is lost, and none of its output was released. All released output belongs to epochs
that the standby has.
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
    """Undo the changes that an epoch made in QEMU, and resume the guest, as a new agent would.

    Returns False if an agent is working, which then resumes the guest itself.
    Raises VmckptError, OSError, ValueError: the guest may still be paused.
    """
    with Path(facts.lock).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if page.stopped == 0:
            return True  # another agent has resumed the guest and is gone
        with QmpMonitor(facts.guest, host=facts.host, uri=facts.uri) as monitor:
            migration_settings.break_off(monitor, Undo.from_json(facts.undo))
        _bound_logs(facts)
        page.stopped = 0.0
        return True


def _bound_logs(facts: Resumable) -> None:
    """Make the guest's writes wait when a log is full, until an agent empties the log."""
    for path in facts.logs:
        with suppress(OSError, ValueError), Control(Path(path)) as control:
            control.never_wait = False
