"""The tracker: a process that keeps the write tracking of a guest from one snapshot to the next.

It holds the userfaultfd, and the number of the capture since which the guest's writes have been
tracked. An agent takes a duplicate of the userfaultfd for its snapshot; the number is gone until
the agent reports a complete capture. So after a failed or interrupted capture, the next one reads
all memory.

The tracker imports little, and so needs little memory. It runs until QEMU ends or an agent ends it.
"""

import json
import os
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST = 1 << 16
"""Maximum length of a message, in bytes."""


class Tracker:
    """Answers agents, one at a time, over a Unix socket that only root can reach."""

    def __init__(
        self, listener: socket.socket, qemu: int, userfaultfd: int, state: dict[str, Any]
    ) -> None:
        """`qemu`: a pidfd; `state`: see `tracker.TrackerState`."""
        self._listener, self._qemu, self._userfaultfd = listener, qemu, userfaultfd
        self._state = state
        self._ends = False

    def run(self) -> None:
        """Answer until QEMU ends or an agent ends the tracker."""
        while not self._ends and self._is_next(self._listener):
            client, _ = self._listener.accept()
            with client, suppress(OSError, ValueError, LookupError, TypeError):
                self._serve(client)
        if not self._ends:
            self._remove_socket()

    def _is_next(self, peer: socket.socket) -> bool:
        """Wait for a connection or a message. Returns False if QEMU has ended."""
        ready, _, _ = select.select([peer.fileno(), self._qemu], [], [])
        return self._qemu not in ready

    def _serve(self, client: socket.socket) -> None:
        if _user_of(client) != os.geteuid():
            return
        while not self._ends and self._is_next(client):
            message = client.recv(LONGEST)
            if not message or _has_left(client):
                return
            told = json.loads(message)
            if told["do"] == "take":
                answer = json.dumps(self._state).encode()
                self._state["number"] = None
                socket.send_fds(client, [answer], [self._userfaultfd])
            elif told["do"] == "keep":
                self._state["number"] = int(told["number"])
                client.send(b"{}")
            elif told["do"] == "end":
                # The agent waits until its line is closed. It may then start another tracker.
                self._remove_socket()
                os.close(self._userfaultfd)
                self._ends = True

    def _remove_socket(self) -> None:
        with suppress(OSError):
            Path(self._listener.getsockname()).unlink()


def _has_left(client: socket.socket) -> bool:
    """Return whether an agent has closed its end, since it no longer waits for the answer."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


def _user_of(client: socket.socket) -> int:
    told = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(told[4:8], sys.byteorder)


def main() -> None:
    """Run a tracker. Its descriptors and its state are read from standard input, as JSON.

    They are not arguments: all users can read the arguments of processes, but must not learn
    addresses in QEMU's memory.
    """
    told = json.load(sys.stdin)
    os.chdir("/")
    listener = socket.socket(fileno=int(told["listener"]))
    Tracker(listener, int(told["qemu"]), int(told["userfaultfd"]), told["state"]).run()


if __name__ == "__main__":
    main()
