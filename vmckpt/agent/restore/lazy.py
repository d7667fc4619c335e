"""Lazy restore: the guest starts at once, with empty images and memory, which the store fills."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from vmckpt.agent.cleanup_orders import FinishOrder
from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel, error_from_json
from vmckpt.agent.restore import lazy_server, restore
from vmckpt.agent.restore.files import Images
from vmckpt.agent.restore.lazy_memory import LazyRevival
from vmckpt.agent.restore.page_server import ServedMemory
from vmckpt.agent.restore.restore import Revival
from vmckpt.capture.disks import lazy_overlay
from vmckpt.errors import BadInput, GuestLocked, OutcomeUnknown, VmckptError
from vmckpt.store.assemble import Source
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.metadata import DiskMake
from vmckpt.store.format.private_part import Private


def restore_lazily(order: RestoreOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Start the guest, and wait until memory and disks are complete or the controller asks to stop.

    Raises BadInput if the snapshot has no memory.

    Once the guest is running, a server fills memory and disks even if the agent and the controller
    die. Returns a RestoreResult as JSON; "whole" is true if both are complete. If the guest did not
    start, everything is undone, and VmckptError or OSError is raised. If a disk cannot be filled
    later, the raised error has `undone` false.
    """
    if order.xml is None:
        raise BadInput(
            "a snapshot without memory cannot be restored lazily, since no guest is started",
            hint="omit --lazy",
        )
    with LazyServerClient({**order.as_json(), "do": "serve"}, order.host) as keeper:
        keeper.wait_ready()
        way = _Lazy(keeper)
        told = restore.restore(order, channel, way)
        keeper.go()
        whole = keeper.watch(channel)
    if not whole and not channel.stop.is_set():
        # The server was killed. Its guard starts another one; if not, this agent does.
        again = FinishOrder(guest=order.guest, host=order.host)
        whole = bool(finish(again, channel)["whole"])
    return {**told, "warnings": [*told["warnings"], *way.warnings()], "whole": whole}


def finish(order: FinishOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Wait until a guest's memory and disks are complete; restart the server if it is dead.

    Returns JSON: "waits" is true if something was incomplete before, "whole" if all is complete
    now. Raises BadInput if the server's order is invalid, the errors that the server reports,
    RemoteError, OSError.
    """
    kept = lazy_server.kept(order.guest)
    if kept is None:
        return {"waits": False, "whole": True}
    if order.dry:
        return {"waits": True, "whole": False}
    while True:
        while lazy_server.is_served(order.guest):
            if channel.stop.wait(0.5):
                return {"waits": True, "whole": False}
        # A server that was killed or has failed leaves its order behind. A new server carries it
        # out, or reports the error.
        kept = lazy_server.kept(order.guest)
        if kept is None:
            return {"waits": True, "whole": True}
        with suppress(GuestLocked), LazyServerClient(kept, order.host) as keeper:
            keeper.wait_ready()
            keeper.go()
            return {"waits": True, "whole": keeper.watch(channel)}


def serve_again(guest: str, host: str) -> None:
    """Start a server for a guest that waits for its memory. Does nothing if one is serving it.

    Raises BadInput if the server's order is invalid, the errors that the server reports,
    RemoteError, OSError.
    """
    if not lazy_server.waits_for_memory(guest) or (kept := lazy_server.kept(guest)) is None:
        return
    with suppress(GuestLocked), LazyServerClient(kept, host) as keeper:
        keeper.wait_ready()
        keeper.go()


class LazyServerClient:
    """The agent's connection to a server of memory and disks, a process that the agent starts.

    Use as a context manager. Leaving the block stops the server, unless `go` was called or it is
    unknown whether the guest is running.
    """

    def __init__(self, order: Mapping[str, Any], host: str) -> None:
        self._order, self._host = order, host
        self._left = False
        self.sockets: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vmckpt.agent.main"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._say(self._order)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        # If it is unknown whether the guest is running, the server checks once its pipe is closed.
        unknown = kind is not None and issubclass(kind, OutcomeUnknown)
        if not self._left and not unknown:
            # A refusal makes the server remove its sockets and exit.
            with suppress(OSError):
                self._say({"refused": "the guest was not started"})
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def wait_ready(self) -> None:
        """Wait until the server is ready. Raises VmckptError or an error the server reports."""
        for told in self._hear():
            if told.get("ask") == "ready":
                self.sockets = dict(told["about"]["sockets"])
                return
        raise VmckptError(f"{self._host}: the server of a lazy restore exited before it was ready")

    def attach(self, memory: ServedMemory) -> None:
        """See lazy_memory.PageServerClient."""
        self.attach_as(memory.as_json())

    def attach_as(self, about: Mapping[str, Any]) -> None:
        """Let the server serve missing pages from now on. `about`: what its `serve` expects.

        Raises VmckptError or an error that the server reports.
        """
        self._say({"answer": about})
        for told in self._hear():
            if told.get("ask") == "attached":
                return
        raise VmckptError(
            f"{self._host}: the server of a lazy restore exited before it served the memory"
        )

    def go(self) -> None:
        """Let the server continue on its own, since the guest is running."""
        self._left = True
        self._say({"answer": True})

    def watch(self, channel: ControllerChannel) -> bool:
        """Forward progress until the server is done or the controller asks to stop.

        Returns whether the server is done. Raises VmckptError.
        """
        for told in self._hear():
            if "done" in told:
                return True
            if "progress" in told:
                channel.send(progress=told["progress"])
            if channel.stop.is_set():
                return False
        return False

    def _say(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "error" in told:
                raise error_from_json(told["error"], self._host)
            yield told


class _Lazy:
    """The restore.RestoreMethod of lazy restores."""

    def __init__(self, server: LazyServerClient) -> None:
        self._server, self._sockets = server, server.sockets
        self._revival: LazyRevival | None = None

    def images(
        self, order: RestoreOrder, private: Private, reader: Source, channel: ControllerChannel
    ) -> Images:
        """See restore.RestoreMethod."""
        return _Overlays(order, private, reader, channel, self._sockets)

    def started_as(self, xml: str) -> str:
        """See restore.RestoreMethod."""
        return lazy_overlay.behind(xml, self._sockets)

    def revival(
        self, order: RestoreOrder, private: Private, reader: Reader, channel: ControllerChannel
    ) -> Revival:
        """See restore.RestoreMethod."""
        self._revival = LazyRevival(order, private, reader, channel, self._server)
        return self._revival

    def warnings(self) -> list[str]:
        """Return a warning if the guest's memory was not restored lazily."""
        if self._revival is None or self._revival.why_whole is None:
            return []
        return [f"the guest started only after all its memory was read: {self._revival.why_whole}"]


class _Overlays(Images):
    """Empty images whose backing files are the exports of the server.

    Disks that the server does not export are written completely.
    """

    def __init__(
        self, order: RestoreOrder, private: Private, reader: Source, channel: ControllerChannel,
        sockets: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(order, private, reader, channel)
        self._sockets = sockets

    def _make(self, disk: DiskMake) -> None:
        if disk.target not in self._sockets:
            super()._make(disk)
            return
        base = f"nbd+unix:///{disk.target}?socket={self._sockets[disk.target]}"
        if (told := self._order.bases.get(disk.target)) is not None:
            self.warnings.append(
                f"disk {disk.target} was an overlay of {told[0]}, and becomes a complete image,"
                " because a lazy restore keeps no base image"
            )
        words = ["qemu-img", "create", "-q", "-f", disk.format, "-F", "raw", "-b", base]
        self._run(self._file(disk), [*words, "--"], (), str(disk.size))
