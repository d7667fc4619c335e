"""The server of a family: serves memory and disks of forks as long as there are forks.

All forks of a family continue from one snapshot. A fork's memory has only the pages that the fork
accessed, and its disks are overlays of this server's exports. The server is a process of its own,
with a guard, and its directory on tmpfs has what the next server needs. When a fork has ended, the
server removes the fork's files.
"""

import json
import os
import select
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vmckpt.agent.fork_orders import ForkOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.restore import keeper_guard, pins, replace_file, restore
from vmckpt.agent.restore.page_server import ServedMemory
from vmckpt.agent.restore.template_memory import TemplateMemory
from vmckpt.agent.snapshot import spool
from vmckpt.capture.disks import lazy_overlay
from vmckpt.capture.memory.missing_pages import MemoryGone, MissingPages
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, HypervisorError, StoreError, VmckptError
from vmckpt.hypervisor import block, connection, qemu_user
from vmckpt.hypervisor.qemu_process import identity, userfaultfd
from vmckpt.hypervisor.qemu_process.injection import CannotInject
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.store.assemble import Assembly, Source
from vmckpt.store.format.private_part import Private
from vmckpt.store.repository import Store
from vmckpt.units import Seconds
from vmckpt.util import atomic_file, host_directories

PREFIX = "family-"
ORDER, _MEMBERS = "order.json", "members.json"
_TURN = Seconds(0.2)
_AGAIN = Seconds(0.5)
_MOST_CLIENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A fork of a family."""

    guest: str
    name: str
    xml: str
    images: Mapping[str, str]
    memory: Mapping[str, Any]
    """The JSON of its ServedMemory."""


def folder_of(family: str) -> Path:
    """Return the directory of a family's server. Raises RemoteError, OSError."""
    return host_directories.run_dir() / f"{PREFIX}{family}"


def members(folder: Path) -> dict[str, Member]:
    """Return the forks of a family, by UUID. Raises BadInput."""
    try:
        told = json.loads((folder / _MEMBERS).read_text())
        return {str(uuid): Member(**one) for uuid, one in told.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as exc:
        raise BadInput(f"{folder / _MEMBERS} is invalid: {exc}") from exc


def keep_request(folder: Path, guest: str) -> Path:
    """Return the file by which the server is asked to make a fork independent."""
    return folder / f"keep-{guest}"


def serve(order: ForkOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Serve the forks of a family until none is left.

    Sends the request "ready" when the disks can be used. Each answer is the JSON of a Member to
    serve, which the request "attached" confirms; any other answer means that all forks are running.
    If the controller disappears before, all forks are destroyed. Raises GuestLocked if another
    process serves the family, VmckptError, OSError.
    """
    keeper_guard.spare_from_oom()
    folder = host_directories.run_dir(folder_of(order.family).name)
    with spool.held(folder, patience=Seconds(0.0)), ExitStack() as stack:
        store, private, reader = stack.enter_context(restore.opened(order.child_order(0)))
        # The order contains the data key, so only root may read this file.
        kept = {**order.as_json(), "do": "serve-family"}
        atomic_file.put(folder / ORDER, json.dumps(kept), private=True)
        keeper_guard.start(folder / ORDER)
        family = _Family(order, folder, private, reader)
        sockets = family.listen(stack)
        pins.pin(store, order.snapshot, _why(order))
        known = members(folder)
        for one in known.values():
            family.attach(one)
        thread = threading.Thread(target=family.answer, name="pages", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(family.close)
        try:
            told = channel.request("ready", sockets=sockets)
            while isinstance(told, dict):
                family.add(Member(**told))
                told = channel.request("attached")
        except VmckptError:
            if not known:  # else this server replaces an earlier one, and the forks are running
                family.end_all()
        family.run()
        _end(folder, store, order)
    return {}


def _why(order: ForkOrder) -> str:
    return f"forks of {order.template} {pins.READS} {order.host} (family {order.family})"


def _end(folder: Path, store: Store, order: ForkOrder) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    pins.unpin(store, order.snapshot, {_why(order)})


def _blocks(private: Private, reader: Source) -> dict[str, Assembly]:
    return {
        one.name: Assembly(one.kind, one.size, one.map, private.chunks, reader)
        for one in private.regions
    }


class _Served:
    """A fork whose faults are answered."""

    def __init__(self, member: Member, process: HeldProcess, memory: ServedMemory) -> None:
        """Let the fork's waiting accesses fault again. Raises OSError, MemoryGone."""
        self.member, self.process, self.memory = member, process, memory
        self.pages = MissingPages(process, memory.number, memory.ranges)
        self.pages.retry()

    def close(self) -> None:
        self.pages.__exit__()
        self.process.close()

    def place(self, address: int) -> tuple[str, MemoryRange, int]:
        """Return the block that contains an address, its range, and the offset in it."""
        for name, one in zip(self.memory.blocks, self.memory.ranges, strict=True):
            if one.start <= address < one.start + one.size:
                return name, one, address - one.start
        raise LookupError(f"no block at {address:#x}")


class _Family:
    """The forks of a family that are served."""

    def __init__(
        self, order: ForkOrder, folder: Path, private: Private, reader: Source
    ) -> None:  # fmt: skip
        self._order, self._folder = order, folder
        disks = {one.target for one in private.facts.disks}
        blocks = _blocks(private, reader)
        self._exports = {
            name: Export(size=one.size, read=one.read_bytes, extents=one.zeros)
            for name, one in blocks.items() if name in disks
        }  # fmt: skip
        self._template = TemplateMemory(
            {name: one for name, one in blocks.items() if name not in disks}
        )
        self._served: dict[int, _Served] = {}
        """The forks, by the descriptor of their userfaultfd."""
        self._waiting: list[tuple[_Served, int]] = []
        """Forks that wait for a page that the store did not return, and its address."""
        self._lock = threading.RLock()
        """Held while `_served` changes or faults are answered."""
        self._over = threading.Event()

    def listen(self, stack: ExitStack) -> dict[str, str]:
        """Serve the disks until the stack is closed.

        Returns the socket of each disk. Raises HypervisorError, OSError.
        """
        user, group = qemu_user.owner(self._order.uri, self._order.host)
        sockets = {name: str(self._folder / f"{name}.nbd") for name in self._exports}
        for name, export in self._exports.items():
            server = Server({name: export}, Unix(sockets[name]), most=_MOST_CLIENTS)
            stack.enter_context(server)
            os.chown(sockets[name], user, group)
        return sockets

    def add(self, member: Member) -> None:
        """Serve another fork, and record it. Raises HypervisorError if its QEMU has ended."""
        self._record({**members(self._folder), member.guest: member})
        if not self.attach(member):
            raise HypervisorError(f"{self._order.host}: QEMU has ended", host=self._order.host)

    def attach(self, member: Member) -> bool:
        """Serve a fork. Returns False if its QEMU has ended. Raises QemuUnclear, OSError."""
        process = identity.hold(member.guest)
        if process is None:
            return False
        memory = ServedMemory.from_json(member.memory)
        if process.pid != memory.pid or memory.number not in userfaultfd.opened(process):
            process.close()
            return False
        try:
            served = _Served(member, process, memory)
        except MemoryGone:
            process.close()
            return False
        with self._lock:
            self._served[served.pages.descriptor] = served
        return True

    def answer(self) -> None:
        """Answer faults until `close`. Runs in a thread of its own."""
        tried = time.monotonic()
        while not self._over.is_set():
            with self._lock:
                known = list(self._served)
            if not known:
                self._over.wait(_TURN)
                continue
            ready = select.select(known, [], [], _TURN)[0]
            with self._lock:
                if self._waiting and time.monotonic() - tried >= _AGAIN:
                    tried = time.monotonic()
                    again, self._waiting = self._waiting, []
                    for served, address in again:
                        self._give(served, address)
                for one in ready:
                    if one in self._served:
                        self._answer(self._served[one])

    def _answer(self, served: _Served) -> None:
        try:
            found = served.pages.faults(0.0)
        except (MemoryGone, OSError):  # QEMU has ended; `run` removes the fork
            self._over.wait(0.01)
            return
        for address in found:
            self._give(served, address)

    def _give(self, served: _Served, address: int) -> None:
        block, where, offset = served.place(address)
        try:
            self._template.give(served.pages, where, block, offset)
        except StoreError:
            self._waiting.append((served, address))
        except (MemoryGone, OSError):
            return

    def close(self) -> None:
        """Stop answering. The forks' accesses then wait for another server."""
        self._over.set()
        with self._lock:
            for one in self._served.values():
                one.close()
            self._served.clear()

    def end_all(self) -> None:
        """Destroy all forks: their creator disappeared before all were started."""
        with self._lock:
            for one in self._served.values():
                one.process.kill()

    def run(self) -> None:
        """Remove the files of forks that have ended, and carry out requests, until none is left.

        Raises BadInput if the record of the forks is invalid, OSError.
        """
        while known := members(self._folder):
            for member in known.values():
                if self._has_ended(member):
                    self._forget(member)
                elif keep_request(self._folder, member.guest).exists():
                    self._keep(member)
            time.sleep(_TURN)

    def _of(self, guest: str) -> _Served | None:
        with self._lock:
            found = (one for one in self._served.values() if one.member.guest == guest)
            return next(found, None)

    def _has_ended(self, member: Member) -> bool:
        served = self._of(member.guest)
        return served is None or not served.process.lives()

    def _forget(self, member: Member, *, files: bool = True) -> None:
        """Stop serving a fork. `files`: also remove its files."""
        if (served := self._of(member.guest)) is not None:
            with self._lock:
                del self._served[served.pages.descriptor]
                self._waiting = [one for one in self._waiting if one[0] is not served]
                served.close()
        for path in member.images.values() if files else ():
            with suppress(OSError):
                replace_file.remove(Path(path))
        keep_request(self._folder, member.guest).unlink(missing_ok=True)
        rest = members(self._folder)
        rest.pop(member.guest, None)
        self._record(rest)

    def _keep(self, member: Member) -> None:
        """Copy all memory and disks of a fork, which then no longer needs this server."""
        served = self._of(member.guest)
        if served is None:
            return
        try:
            for name, where in zip(served.memory.blocks, served.memory.ranges, strict=True):
                for group in self._template.groups(name):
                    with self._lock:
                        self._template.give_group(served.pages, where, name, group)
            served.pages.unregister()
        except StoreError:
            return  # tried again in the next turn
        except MemoryGone:
            return
        with suppress(CannotInject, OSError):
            userfaultfd.close_inside(served.process, served.memory.number)
        self._pull(member)
        self._forget(member, files=False)

    def _pull(self, member: Member) -> None:
        """Copy the disks of a fork. Retries until QEMU has ended."""
        for name in self._exports:
            while True:
                try:
                    with QmpMonitor(
                        member.guest, host=self._order.host, uri=self._order.uri
                    ) as monitor:
                        if self._is_pulled(monitor, name):
                            break
                        if block.progress(monitor, name) is None:
                            block.start_pull(monitor, name)
                except HypervisorError as exc:
                    if exc.code in connection.NOT_HERE:
                        return
                time.sleep(_TURN)

    def _is_pulled(self, monitor: QmpMonitor, name: str) -> bool:
        xml: str = monitor.on_domain("reading the definition", lambda domain: domain.XMLDesc())
        sockets = {name: str(self._folder / f"{name}.nbd")}
        return block.progress(monitor, name) is None and not lazy_overlay.waiting(xml, sockets)

    def _record(self, known: Mapping[str, Member]) -> None:
        told = json.dumps({uuid: asdict(one) for uuid, one in known.items()})
        atomic_file.put(self._folder / _MEMBERS, told, private=True)
