"""The agent of a protection: runs beside the guest or its standby until the protection ends.

Started as `python -m vmckpt.agent.replication.main FOLDER`. FOLDER contains all of the agent's
state, so the agent can be restarted at any time and continues from that state.
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
    """Truncate a large log to its last 64 KiB.

    The log is on tmpfs, and an agent that keeps failing writes to it every second.
    """
    log_file = folder / AGENT_LOG
    with suppress(OSError):
        if log_file.stat().st_size > _LOG_LIMIT and os.path.samestat(os.fstat(2), log_file.stat()):
            end = log_file.read_bytes()[-_LOG_KEPT:]
            os.ftruncate(2, 0)
            os.write(2, end)  # the log was opened for appending


def main() -> None:
    """Run the agent.

    Exits with status 0 once the protection has ended or if none is recorded, and 1 if the agent
    must be restarted.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    os.umask(0o022)  # QEMU needs access to some of our directories; private files set their mode
    folder = Path(sys.argv[1])
    _bound_log(folder)
    requests = Requests()
    signal.signal(signal.SIGTERM, lambda *_: requests.add(Request.END))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    session = Session.read(folder)
    if session is None:
        log.error("no protection is recorded in %s", folder)
        return
    try:
        priority.raise_own()
    except OSError:
        log.warning("the agent is not permitted to raise its priority")
    try:
        run = run_primary if session.role == "primary" else run_backup
        run(session, folder, requests)
    except VmckptError as exc:
        log.exception("%s", exc)
        sys.exit(1)


if __name__ == "__main__":
    main()
