"""The server of a lazy restore: serves a running guest's memory and disks, and fills them.

The server is a separate process that outlives the agent and the controller. Its order is kept in a
directory on tmpfs, so that the server can be restarted. A reboot deletes this directory and stops
the guest.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import keeper_guard, pins, restore
from vmckpt.agent.restore.page_server import FirstPages, PageServer, ServedMemory
from vmckpt.agent.snapshot import spool
from vmckpt.capture.disks import lazy_overlay
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, Cancelled, GuestLocked, HypervisorError
from vmckpt.hypervisor import block, connection, qemu_user
from vmckpt.hypervisor.qemu_process import identity, userfaultfd
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.disk import is_locked
from vmckpt.store.assemble import Assembly, Source
from vmckpt.store.format.private_part import Private
from vmckpt.store.repository import Store
from vmckpt.units import Seconds
from vmckpt.util import atomic_file, host_directories

_ORDER, _MEMORY = "order.json", "memory.json"
_TURN = Seconds(0.2)
_AGAIN = Seconds(2.0)
_ARRIVES = Seconds(20.0)
"""How long to wait for the guest to start, if the agent died before it reported the result."""


def folder_of(guest: str) -> Path:
    """Return the directory with the sockets and the order of a guest's server.

    Raises RemoteError, OSError.
    """
    return host_directories.run_dir() / f"lazy-{guest}"


def order_file(guest: str) -> Path:
    """Return the file with the order of a guest's server. Raises RemoteError, OSError."""
    return folder_of(guest) / _ORDER


def kept(guest: str) -> dict[str, Any] | None:
    """Return the order of a guest's server; None if no lazy restore of the guest is unfinished.

    Raises BadInput if the order is invalid, RemoteError, OSError.
    """
    try:
        told: dict[str, Any] = json.loads(order_file(guest).read_text())
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise BadInput(f"{order_file(guest)} is invalid: {exc}") from exc
    return told


def serve(order: RestoreOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Serve a guest's memory and disks, and fill them until they are complete.

    Sends the request "ready" once the disks can be used. The answer is the memory to serve, as the
    JSON of ServedMemory; the server then sends the request "attached" once it serves the memory.
    Any other answer means that the guest is running; without an answer, the server itself checks
    for the guest. Raises GuestLocked if another process serves the guest, VmckptError, OSError.
    After an error of `_Keeper.run`, the order is kept, so that recovery can start another server.
    Returns the duration in seconds, under "pulled".
    """
    began = time.monotonic()
    keeper_guard.spare_from_oom()
    with spool.held(folder_of(order.guest), patience=Seconds(0.0)), ExitStack() as stack:
        store, private, reader = stack.enter_context(restore.opened(order))
        folder = _furnished(order)
        keeper_guard.start(order_file(order.guest))
        keeper = _Keeper(order, channel, _exports(private, reader))
        keeper.listen(stack)
        _pin(store, order)
        known = _served_memory(folder)
        if known is not None:  # the previous server was killed
            keeper.memory = _page_server(order, known, private, reader, stack)
        try:
            told = channel.request("ready", sockets=keeper.sockets)
            if isinstance(told, dict):
                atomic_file.put(folder / _MEMORY, json.dumps(told), private=True)
                known = ServedMemory.from_json(told)
                keeper.memory = _page_server(order, known, private, reader, stack)
                if keeper.memory is None:
                    raise HypervisorError(f"{order.host}: QEMU has ended", host=order.host)
                channel.request("attached")
        except Cancelled:
            if not keeper.arrived():
                _end(folder, store, order)
                return {"pulled": 0.0}
        except BaseException:
            _end(folder, store, order)
            raise
        try:
            keeper.run()
        except BaseException:
            (folder / keeper_guard.FAILED).touch()
            raise
        _end(folder, store, order)
    return {"pulled": time.monotonic() - began}


def _furnished(order: RestoreOrder) -> Path:
    folder = host_directories.run_dir(folder_of(order.guest).name)
    (folder / keeper_guard.FAILED).unlink(missing_ok=True)
    # The order contains the data key, so only root may read this file. `_end` deletes it.
    atomic_file.put(folder / _ORDER, json.dumps({**order.as_json(), "do": "serve"}), private=True)
    return folder


def waits_for_memory(guest: str) -> bool:
    """Return whether a guest's memory is incomplete and no server is serving it.

    Such a guest does not answer, and neither does libvirt for it. Raises RemoteError, OSError.
    """
    return (folder_of(guest) / _MEMORY).exists() and not is_served(guest)


def is_served(guest: str) -> bool:
    """Return whether a server holds the guest's lock. Raises RemoteError, OSError."""
    try:
        with spool.held(folder_of(guest), patience=Seconds(0.0)):
            return False
    except GuestLocked:
        return True


def _served_memory(folder: Path) -> ServedMemory | None:
    """Return the memory that a previous server served; None if there is none. Raises BadInput."""
    try:
        return ServedMemory.from_json(json.loads((folder / _MEMORY).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as exc:
        raise BadInput(f"{folder / _MEMORY} is invalid: {exc}") from exc


def _page_server(
    order: RestoreOrder, memory: ServedMemory, private: Private, reader: Source, stack: ExitStack
) -> PageServer | None:
    """Serve memory until the stack is closed. Returns None if the QEMU process has ended.

    Raises QemuUnclear, StoreDamaged, OSError.
    """
    process = identity.hold(order.guest)
    if process is None:
        return None
    stack.callback(process.close)
    if process.pid != memory.pid or memory.number not in userfaultfd.opened(process):
        return None
    regions = {one.name: one for one in private.regions if one.name in memory.blocks}
    content = {
        name: Assembly(one.kind, one.size, one.map, private.chunks, reader)
        for name, one in regions.items()
    }
    record = FirstPages(Path(order.state), order.snapshot)
    return stack.enter_context(PageServer(process, memory, content, record))


def _exports(private: Private, reader: Source) -> dict[str, Export]:
    """Return the exports of the disks that can be filled while in use: QEMU can fill only qcow2."""
    found = {}
    for disk in private.facts.disks:
        region = private.region(disk.target)
        if region is not None and disk.format == "qcow2":
            assembly = Assembly(region.kind, region.size, region.map, private.chunks, reader)
            found[disk.target] = Export(
                size=region.size, read=assembly.read_bytes, extents=assembly.zeros
            )
    return found


def _pin(store: Store, order: RestoreOrder) -> None:
    """Pin the snapshot while its memory and disks are served."""
    pins.pin(store, order.snapshot, _why(order), _whys(order))


def _why(order: RestoreOrder) -> str:
    return f"guest {order.guest} {pins.READS} {order.host}"


def _whys(order: RestoreOrder) -> set[str]:
    """Return the reason that `_pin` stores, and the reasons that earlier versions stored."""
    return {
        _why(order),
        f"guest {order.guest} {pins.READS_DISKS} {order.host}",
        f"the disks of {order.guest} {pins.READS_OLD} {order.host}",
    }


def _end(folder: Path, store: Store, order: RestoreOrder) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    pins.unpin(store, order.snapshot, _whys(order))


class _Keeper:
    """Serves a guest's disks, and fills its memory and images."""

    memory: PageServer | None = None
    """Serves the guest's memory; None: its memory is complete."""

    def __init__(
        self, order: RestoreOrder, channel: ControllerChannel, exports: Mapping[str, Export]
    ) -> None:
        self._order, self._channel, self._exports = order, channel, exports
        self.sockets = {name: str(folder_of(order.guest) / f"{name}.nbd") for name in exports}
        self._total = sum(one.size for one in exports.values())

    def listen(self, stack: ExitStack) -> None:
        """Serve the disks until the stack is closed. Raises HypervisorError, OSError."""
        user, group = qemu_user.owner(self._order.uri, self._order.host)
        for name, export in self._exports.items():
            stack.enter_context(Server({name: export}, Unix(self.sockets[name])))
            os.chown(self.sockets[name], user, group)

    def arrived(self) -> bool:
        """Wait up to 20 s until the guest runs. Returns whether it runs, and uses this server."""
        give_up = time.monotonic() + _ARRIVES
        while time.monotonic() < give_up:
            with suppress(HypervisorError), self._monitor() as monitor:
                if monitor.run_state() not in ("inmigrate", "shutdown", "internal-error"):
                    return self.memory is not None or bool(self._waiting(monitor))
            time.sleep(_TURN)
        return False

    def run(self) -> None:
        """Fill the memory, then the images one after the other, even if the guest stops meanwhile.

        Raises HypervisorError if qemu-img cannot fill an image.
        """
        self._fill_memory()
        done = 0
        for name, export in self._exports.items():
            while not self._is_whole(name):
                try:
                    self._pull(name, done)
                except HypervisorError as exc:
                    if exc.code in connection.NOT_HERE:
                        self._finish_off(name)
                    else:
                        self._channel.send(progress={"phase": "disks", "done": done})
                        time.sleep(_AGAIN)
            done += export.size

    def _fill_memory(self) -> None:
        if self.memory is None:
            return
        for done in self.memory.fill():
            self._channel.progress(phase="memory", done=done, total=self.memory.total)
        (folder_of(self._order.guest) / _MEMORY).unlink(missing_ok=True)

    def _pull(self, name: str, done: int) -> None:
        with self._monitor() as monitor:
            if name not in self._waiting(monitor):
                return
            if block.progress(monitor, name) is None:
                block.start_pull(monitor, name)
            while (found := block.progress(monitor, name)) is not None:
                self._channel.progress(phase="disks", done=done + found.done, total=self._total)
                self._wake(monitor)
                time.sleep(_TURN)
            self._wake(monitor)
            if name in self._waiting(monitor):
                time.sleep(_AGAIN)  # the job failed, for example because the server was restarted

    def _wake(self, monitor: QmpMonitor) -> None:
        """Resume a guest that was paused because no server answered its reads."""
        if block.stopped_by_disk(monitor):
            monitor.resume()

    def _finish_off(self, name: str) -> None:
        """Fill the image with qemu-img, since the guest is no longer running.

        Raises HypervisorError, unless qemu-img fails because the image is in use.
        """
        words = ["qemu-img", "rebase", "-q", "-f", "qcow2", "-b", "", self._order.images[name]]
        done = subprocess.run(words, capture_output=True, check=False, text=True, errors="replace")
        if done.returncode == 0:
            return
        if not is_locked(done.stderr):
            raise self._not_filled(name, done.stderr)
        time.sleep(_AGAIN)  # the guest was probably started again

    def _not_filled(self, name: str, said: str) -> HypervisorError:
        why = " ".join(said.split())[:200] or "no error message"
        error = HypervisorError(
            f"{self._order.host}: the image of disk {name} cannot be filled: {why}",
            host=self._order.host, hint="fix the cause, then run vmckpt recover",
        )  # fmt: skip
        # The guest was restored, so its job must stay open for recovery.
        error.undone = False
        return error

    def _is_whole(self, name: str) -> bool:
        words = ["qemu-img", "info", "-U", "--output=json", self._order.images[name]]
        done = subprocess.run(words, capture_output=True, check=False, text=True)
        if done.returncode:
            return not Path(self._order.images[name]).exists()
        return "backing-filename" not in json.loads(done.stdout)

    def _waiting(self, monitor: QmpMonitor) -> frozenset[str]:
        doing = "reading the guest's definition"
        xml: str = monitor.on_domain(doing, lambda domain: domain.XMLDesc())
        return lazy_overlay.waiting(xml, self.sockets)

    def _monitor(self) -> QmpMonitor:
        return QmpMonitor(self._order.guest, host=self._order.host, uri=self._order.uri)
