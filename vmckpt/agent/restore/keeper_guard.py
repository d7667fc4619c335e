"""Start another keeper of a lazy restore if the present one is killed.

    python3 -m vmckpt.agent.restore.keeper_guard ORDER KEEPER

ORDER is the file with the keeper's order, KEEPER its process ID. A guest that needs data waits as
long as there is no keeper; a guest that waits for memory does not even answer libvirt. So the guard
does not leave it to an operator. It exits when the keeper has finished, which removes ORDER, or has
failed, which it reports in a file beside ORDER.
"""

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FAILED = "failed"
"""File beside the order: the keeper has failed, and another one would fail as well."""
_AGAIN = 2.0
"""Seconds between two starts."""
_UNKILLABLE = "-1000"
_GUARDED = "VMCKPT_GUARDED"
"""Environment variable of a keeper that has a guard."""


def start(order: Path) -> None:
    """Start the guard of this process, a keeper, unless it was started by its guard.

    Raises OSError.
    """
    if _GUARDED in os.environ:
        return
    words = [sys.executable, "-P", "-m", "vmckpt.agent.restore.keeper_guard", str(order)]
    subprocess.run(
        ["setsid", "--fork", *words, str(os.getpid())], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def spare_from_oom() -> None:
    """Ask the kernel not to kill this process when memory is short, since a guest depends on it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_UNKILLABLE)


def guard(order: Path, keeper: int) -> None:
    """Wait for the keeper, and start another one as long as the order exists. Raises OSError."""
    with suppress(ProcessLookupError):
        watched = os.pidfd_open(keeper)
        select.select([watched], [], [])
        os.close(watched)
    while order.exists() and not order.with_name(FAILED).exists():
        began = time.monotonic()
        text = order.read_text()
        # The end of the input means that no controller is there.
        subprocess.run(
            [sys.executable, "-P", "-m", "vmckpt.agent.main"], input=text + "\n", text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            env={**os.environ, _GUARDED: "1"},
        )  # fmt: skip
        time.sleep(max(0.0, _AGAIN - (time.monotonic() - began)))


def main() -> None:
    """Guard the keeper named on the command line."""
    spare_from_oom()
    with suppress(OSError):
        guard(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
