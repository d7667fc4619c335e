"""A QEMU that has no guest and no libvirt, and its monitor."""

import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from vmckpt.hypervisor.qmp import QmpRefused


class Qmp:
    """QEMU's monitor on a socket; what `Commands` asks for."""

    guest, host, uri, name = "none", "here", "none", "guestless"

    def __init__(self, connected: socket.socket, limit: float = 20.0) -> None:
        self._socket = connected
        self._socket.settimeout(limit)
        self._lines = self._socket.makefile("rb")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def ask(self, command: str, **arguments: object) -> Any:
        return self.tell(command, arguments)

    def tell(
        self, command: str, arguments: dict[str, object], *, files: tuple[int, ...] = ()
    ) -> Any:
        assert not files
        order = json.dumps({"execute": command, "arguments": arguments})
        self._socket.sendall(order.encode() + b"\n")
        while True:
            # Its greeting and its events are passed over.
            told = json.loads(self._lines.readline())
            if "error" in told:
                raise QmpRefused(told["error"]["desc"], host=self.host)
            if "return" in told:
                return told["return"]

    def run_state(self) -> str:
        return str(self.ask("query-status")["status"])

    def paused_by_user(self) -> bool:
        return False

    def described(self) -> str:
        return "<domain/>"


@contextmanager
def qemu(
    *options: str, files: Sequence[int] = (), under: Sequence[str] = (), limit: float = 20.0
) -> Iterator[Qmp]:
    """One with so many options, and files that it finds by their numbers; `under`: a program that
    runs it; `limit`: seconds that it may take for an answer."""
    ours, theirs = socket.socketpair()
    with ExitStack() as undo:
        qmp = Qmp(ours, limit)
        undo.callback(qmp.close)
        with theirs:
            process = subprocess.Popen(
                [
                    *under, "qemu-system-x86_64", "-machine", "none", "-accel", "tcg",
                    "-nodefaults", "-display", "none", "-mon", "chardev=qmp,mode=control",
                    "-chardev", f"socket,id=qmp,fd={theirs.fileno()}", *options,
                ],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *files],
            )  # fmt: skip
        undo.callback(process.wait)
        undo.callback(process.kill)
        qmp.tell("qmp_capabilities", {})
        yield qmp
