"""Start forks of a snapshot on this host, list them, and drop or keep them."""

import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vmckpt.agent.fork_orders import (
    ChildOrder,
    DropForksOrder,
    FamiliesOrder,
    ForkChild,
    ForkOrder,
    KeepForkOrder,
)
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import family_server, restore
from vmckpt.agent.restore.family_server import Member
from vmckpt.agent.restore.files import Images, SmallFiles
from vmckpt.agent.restore.lazy import LazyServerClient
from vmckpt.agent.restore.lazy_memory import LazyRevival
from vmckpt.agent.restore.page_server import ServedMemory
from vmckpt.capture.disks import lazy_overlay
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import (
    BadInput,
    Cancelled,
    HypervisorError,
    QemuUnclear,
    TimedOut,
    VmckptError,
)
from vmckpt.hypervisor import connection, standby_domain
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.metadata import DiskMake
from vmckpt.store.format.private_part import Private
from vmckpt.units import Seconds
from vmckpt.util import host_directories

_PARALLEL = 4
"""Forks that are started at the same time; libvirt and QEMU use the processors meanwhile."""
_TURN = Seconds(0.1)
_REMOVED = Seconds(20.0)
"""How long the family's server may take to notice that a fork has ended."""


def fork(order: ForkOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Start the forks of an order; see ForkOrder.

    Raises BadInput, StoreError, Cancelled, and the first fork's error if no fork could be started.
    Nothing is left then.
    """
    began = time.monotonic()
    serve = {**order.as_json(), "do": "serve-family"}
    with (
        restore.opened(order.child_order(0)) as (_, private, reader),
        LazyServerClient(serve, order.host) as server,
    ):
        server.wait_ready()
        family = _Family(order, private, reader, channel, server)
        children = family.start(began)
        if all(one["error"] for one in children):
            raise family.first_error
        server.go()
    return {"children": children, "took": time.monotonic() - began}


class _Family:
    """The forks of an order while they are started."""

    def __init__(
        self, order: ForkOrder, private: Private, reader: Reader, channel: ControllerChannel,
        server: LazyServerClient,
    ) -> None:  # fmt: skip
        self._order, self._private, self._reader = order, private, reader
        self._channel, self._server = channel, server
        self._lock = threading.Lock()
        self.first_error: Exception = VmckptError("no fork was started")

    def start(self, began: float) -> list[dict[str, Any]]:
        """Start all forks, some at a time. Returns the result of each.

        `began`: when the order began, by time.monotonic(). Raises Cancelled.
        """
        with ThreadPoolExecutor(_PARALLEL) as pool:
            work = [
                pool.submit(self._child, index, began) for index in range(len(self._order.children))
            ]
            done = []
            for number, one in enumerate(work, 1):
                done.append(one.result())
                self._channel.progress(phase="forks", done=number, total=len(work))
        if self._channel.stop.is_set():
            raise Cancelled("stopped while the forks were started")
        return done

    def _child(self, index: int, began: float) -> dict[str, Any]:
        child, order = self._order.children[index], self._order.child_order(index)
        told = {"guest": child.guest, "name": child.name, "took": 0.0, "clock_not_set": ""}
        if self._channel.stop.is_set():
            return {**told, "error": "not started"}
        try:
            clock = self._started(child, order)
        except (VmckptError, OSError) as exc:
            if not isinstance(self.first_error, OSError | BadInput):
                self.first_error = exc
            return {**told, "error": str(exc)}
        finally:
            shutil.rmtree(order.folder, ignore_errors=True)
        return {
            **told, "took": time.monotonic() - began, "clock_not_set": clock, "error": "",
        }  # fmt: skip

    def _started(self, child: ForkChild, order: ChildOrder) -> str:
        """Start a fork. Returns why its clock was not set. Raises VmckptError, OSError."""
        shutil.rmtree(order.folder, ignore_errors=True)
        order.folder.mkdir(mode=0o700, parents=True)
        files = SmallFiles(self._private.files, order.images, order.snapshot, replace=False)
        sockets = self._server.sockets
        images = _Overlays(order, self._private, self._reader, self._channel, sockets)
        with images, files:
            images.write()
            files.write()
            images.swap()
            files.swap()
            xml = lazy_overlay.behind(child.xml, sockets)
            client = _PageServer(self._server, child, self._lock)
            started = replace(order, xml=xml)
            revival = LazyRevival(started, self._private, self._reader, self._channel, client)
            restore.start(started, revival)
            if revival.why_whole is not None:
                _destroy(order)
                raise HypervisorError(
                    f"{order.host}: {child.name} cannot share memory: {revival.why_whole}",
                    host=order.host,
                    hint="docs/snapshots.md, Lazy restores, has the conditions",
                )  # fmt: skip
            images.keep()
            files.keep()
        return restore.tell_guest(order, self._private).clock


class _PageServer:
    """Lets the family's server serve one fork."""

    def __init__(self, server: LazyServerClient, child: ForkChild, lock: threading.Lock) -> None:
        self._server, self._child, self._lock = server, child, lock

    def attach(self, memory: ServedMemory) -> None:
        """See lazy_memory.PageServerClient."""
        one = self._child
        member = Member(
            guest=one.guest, name=one.name, xml=one.xml, images=one.images, memory=memory.as_json()
        )
        with self._lock:  # the server handles one request at a time
            self._server.attach_as(asdict(member))


class _Overlays(Images):
    """Overlays of the exports of the family's server."""

    def __init__(
        self, order: ChildOrder, private: Private, reader: Reader, channel: ControllerChannel,
        sockets: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(order, private, reader, channel)
        self._sockets = sockets

    def _make(self, disk: DiskMake) -> None:
        base = f"nbd+unix:///{disk.target}?socket={self._sockets[disk.target]}"
        words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base]
        self._run(self._file(disk), [*words, "--"], (), str(disk.size))


def _destroy(order: ChildOrder) -> None:
    with suppress(HypervisorError), _monitor(order.guest, order) as monitor:
        monitor.end()


def _monitor(guest: str, order: ChildOrder | DropForksOrder) -> QmpMonitor:
    return QmpMonitor(guest, host=order.host, uri=order.uri)


def families(order: FamiliesOrder, _: ControllerChannel | None = None) -> dict[str, Any]:
    """List the families; see FamiliesOrder. Raises BadInput, RemoteError, OSError."""
    del order
    found = []
    for folder in _folders():
        with suppress(FileNotFoundError):
            told = json.loads((folder / family_server.ORDER).read_text())
            found.append({
                "family": told["family"], "template": told["template"],
                "snapshot": told["snapshot"], "store": told["store"]["name"],
                "children": [_described(one) for one in family_server.members(folder).values()],
            })  # fmt: skip
    return {"families": found}


def _folders() -> Iterator[Path]:
    yield from sorted(host_directories.run_dir().glob(f"{family_server.PREFIX}*/"))


def _described(member: Member) -> dict[str, Any]:
    runs, memory = False, 0
    with suppress(QemuUnclear, OSError):
        process = identity.hold(member.guest)
        if process is not None:
            with process:
                runs = True
                ranges = ServedMemory.from_json(member.memory).ranges
                pages = ProcessMemory(process, ranges)
                memory = sum(int(pages.populated(one).sum()) for one in range(len(ranges)))
    return {
        "guest": member.guest, "name": member.name, "runs": runs, "memory_bytes": memory * PAGE,
        "disk_bytes": sum(_allocated(path) for path in member.images.values()),
    }  # fmt: skip


def _allocated(path: str) -> int:
    try:
        return Path(path).stat().st_blocks * 512
    except OSError:
        return 0


def _home(guest: str) -> Path | None:
    """Return the directory of a fork's family; None if the guest is not such a fork."""
    return next((one for one in _folders() if guest in family_server.members(one)), None)


def drop(order: DropForksOrder, _: ControllerChannel | None = None) -> dict[str, Any]:
    """Destroy forks; see DropForksOrder. Raises TimedOut, HypervisorError, OutcomeUnknown."""
    dropped = []
    for guest in order.guests:
        if _home(guest) is None:
            continue
        try:
            with _monitor(guest, order) as monitor:
                monitor.end()
        except HypervisorError as exc:
            if exc.code not in connection.NOT_HERE:
                raise
        dropped.append(guest)
    for guest in dropped:
        _wait_until_left(guest, order.host, _REMOVED)
    return {"dropped": dropped}


def _wait_until_left(guest: str, host: str, limit: Seconds) -> None:
    give_up = time.monotonic() + limit
    while _home(guest) is not None:
        if time.monotonic() > give_up:
            raise TimedOut(
                f"{host}: the server of the family of fork {guest} has not removed its files",
                hint="try again in a minute",
            )
        time.sleep(_TURN)


def keep(order: KeepForkOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Make a fork independent; see KeepForkOrder.

    Raises BadInput if the guest is no fork of a family, Cancelled, HypervisorError.
    """
    folder = _home(order.guest)
    if folder is None:
        raise BadInput(
            f"{order.host}: no family has the fork {order.guest}", hint="run vmckpt fork tree"
        )
    member = family_server.members(folder)[order.guest]
    family_server.keep_request(folder, order.guest).touch()
    while _home(order.guest) is not None:
        channel.progress(phase="memory", **_kept_bytes(member))
        if channel.stop.wait(_TURN):
            raise Cancelled("the fork is still being copied in the background")
    if not identity.runs(order.guest):
        raise HypervisorError(f"{order.host}: {member.name} has ended", host=order.host)
    standby_domain.define(member.xml, host=order.host, uri=order.uri)
    return {"kept": True}


def _kept_bytes(member: Member) -> dict[str, int]:
    total = sum(one.size for one in ServedMemory.from_json(member.memory).ranges)
    return {"done": int(_described(member)["memory_bytes"]), "total": total}
