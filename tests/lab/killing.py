"""Runs inside a lab host: the agent of a protection, which dies at a call to QEMU of an epoch.

    python -m tests.lab.killing FOLDER COMMAND:N[+]

Right before the N-th such command since its third epoch began, or with `+` right after it.
"""

import os
import signal
import sys
from typing import Any
from unittest import mock

from vmckpt.agent.replication import main as replication_main
from vmckpt.agent.replication import primary
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.primary.epoch_capture import Capturer, Epoch

_EPOCH = 3


class Killing(QmpMonitor):
    """A monitor at which the process dies."""

    command, left, after = "", 0, False
    epochs = 0

    def _monitor(self, command: str, *args: Any, **more: Any) -> Any:
        kills = self.kills(command)
        if kills and not Killing.after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super()._monitor(command, *args, **more)
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    @staticmethod
    def kills(command: str) -> bool:
        if command != Killing.command or Killing.epochs < _EPOCH:
            return False
        Killing.left -= 1
        return Killing.left == 0


class Counting(Capturer):
    """Counts the epochs."""

    def take(self, *, goes_on: bool = True) -> Epoch:
        Killing.epochs += 1
        return super().take(goes_on=goes_on)


def main() -> None:
    at = sys.argv.pop()
    Killing.after = at.endswith("+")
    Killing.command, _, left = at.removesuffix("+").partition(":")
    Killing.left = int(left)
    mock.patch.object(primary, "QmpMonitor", Killing).start()
    mock.patch.object(primary, "Capturer", Counting).start()
    replication_main.main()


if __name__ == "__main__":
    main()
