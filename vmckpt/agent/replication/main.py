"""The agent of a protection: runs beside the guest, or beside its standby, until that is over.

`python -m vmckpt.agent.replication.main FOLDER`. All that it must know lies in the folder, so it
can be started again at any time and goes on with what it finds.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from vmckpt.agent.replication.backup import run_backup
from vmckpt.agent.replication.primary import run_primary
from vmckpt.errors import VmckptError
from vmckpt.replication import priority
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.session import Session
from vmckpt.replication.watchdog.process import AGENT_LOG

log = logging.getLogger("vmckpt.replica")
_LOG_LIMIT, _LOG_KEPT = 1 << 20, 64 << 10


def _bound_log(folder: Path) -> None:
    """Keep the end of a log that has grown: it lies in memory, and an agent that fails again and
    again writes into it each second."""
    log_file = folder / AGENT_LOG
    with suppress(OSError):
        if log_file.stat().st_size > _LOG_LIMIT and os.path.samestat(os.fstat(2), log_file.stat()):
            end = log_file.read_bytes()[-_LOG_KEPT:]
            os.ftruncate(2, 0)
            os.write(2, end)  # it was opened to append


def main() -> None:
    """Exit status 0 when the protection has ended, 1 when it must be started again."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    os.umask(0o022)  # folders of ours that QEMU enters; what is private says so
    folder = Path(sys.argv[1])
    _bound_log(folder)
    requests = Requests()
    signal.signal(signal.SIGTERM, lambda *_: requests.add(Request.END))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    session = Session.read(folder)
    if session is None:
        log.error("%s: nothing is to be protected here", folder)
        return
    try:
        priority.raise_own()
    except OSError:
        log.warning("not as important as it should be: it may not raise its priority")
    try:
        run = run_primary if session.role == "primary" else run_backup
        run(session, folder, requests)
    except VmckptError as exc:
        log.exception("%s", exc)
        sys.exit(1)


if __name__ == "__main__":
    main()
