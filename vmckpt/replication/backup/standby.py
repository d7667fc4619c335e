"""The standby on the backup: a QEMU that is waiting for device state; the guest is not running yet.

The agent maps the standby's memory. The standby's network links are down, and its disks are
exported for writing. Device state is loaded last, and can be loaded only once; then the guest runs
from the last committed epoch.

The NBD client in this module keeps many write requests in flight, with the same result as in-order
execution. A server may process requests in flight in any order, so a request waits for all earlier
requests that it overlaps. As with `Client`, every error is a HypervisorError and ends the
connection.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Self

from vmckpt.capture import migration_settings
from vmckpt.capture.memory import memory_files
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.migration_settings import EVENTS, IGNORE_SHARED
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, _Request
from vmckpt.capture.nbd.protocol import Place, Unix
from vmckpt.capture.qemu_stream import device_state
from vmckpt.errors import BadInput, CaptureFailed, HypervisorError
from vmckpt.hypervisor import qemu_user
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.backup import standby_xml
from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.write_log import Buffer, Record
from vmckpt.replication.protocol.memory_layout import Dimm, Layout, difference
from vmckpt.replication.session import Disk
from vmckpt.units import MIB, Bytes, Seconds, show_bytes

_MOST_REQUESTS = 64
_LONGEST = 1 << 30
"""Maximum number of bytes that one request without data may cover."""

_WORDS = {
    wire.CMD_WRITE: "writing bytes",
    wire.CMD_WRITE_ZEROES: "writing zeros to bytes",
    wire.CMD_TRIM: "trimming bytes",
    wire.CMD_FLUSH: "flushing the disk",
}


class NbdWriter(Client):
    """A connection to one writable NBD export. Use as `with NbdWriter(...) as disk`.

    If a request fails, `flush` or a call before it raises the error. After `flush`, all earlier
    writes are on the disk. Reading waits for all requests in flight.
    """

    def __init__(
        self,
        place: Place,
        export: str,
        *,
        host: str,
        window: int = 8 * MIB,
    ) -> None:
        """`window`: maximum number of bytes of data in flight. Raises HypervisorError."""
        super().__init__(place, export, host=host)
        self._window = window
        self._writing: dict[int, tuple[int, _Request]] = {}
        """Command and request of each handle in flight."""
        self._much = 0
        with self._safely():
            if self.read_only:
                raise wire.NbdRefused("it is read-only")

    def apply(self, record: Record) -> None:
        """Apply a record of a write log."""
        if record.data is not None:
            self.write(record.offset, record.data)
        elif record.kind == write_log.ZEROS:
            self.zeros(record.offset, record.length)
        else:
            self.trim(record.offset, record.length)

    def write(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`, in bytes."""
        view = memoryview(data)
        for begin, length in self._cut([(offset, len(view))]):
            part = view[begin - offset : begin - offset + length]
            self._order(wire.CMD_WRITE, begin, length, part)

    def zeros(self, offset: int, length: int) -> None:
        """Make `length` bytes at `offset` read as zeros."""
        self._without_content(wire.CMD_WRITE_ZEROES, offset, length)

    def trim(self, offset: int, length: int) -> None:
        """Discard `length` bytes at `offset`."""
        self._without_content(wire.CMD_TRIM, offset, length)

    def flush(self) -> None:
        """Wait until all written data is on stable storage. Raises HypervisorError."""
        self.wait()
        self._order(wire.CMD_FLUSH, 0, 0)
        self.wait()

    def wait(self) -> None:
        """Wait for the replies to all requests in flight. Raises HypervisorError."""
        while self._writing:
            self._take_one()

    def _without_content(self, kind: int, offset: int, length: int) -> None:
        end = self._checked(offset, length)
        for begin in range(offset, end, _LONGEST):
            self._order(kind, begin, min(_LONGEST, end - begin))

    def _order(self, kind: int, offset: int, length: int, data: Buffer = b"") -> None:
        while self._must_wait(offset, length, len(data)):
            self._take_one()
        handle, self._next = self._next, self._next + 1
        order = wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, kind, handle, offset, length)
        with self._safely():
            self._line.send(order, data)
        self._pending[handle] = request = _Request(offset=offset, length=length, status=False)
        self._writing[handle] = kind, request
        self._much += len(data)

    def _must_wait(self, offset: int, length: int, much: int) -> bool:
        if len(self._writing) >= _MOST_REQUESTS or (much and self._much + much > self._window):
            return bool(self._writing)
        return any(
            one.offset < offset + length and offset < one.offset + one.length
            for _, one in self._writing.values()
        )

    def _ask(self, offset: int, length: int, *, status: bool) -> _Request:
        self.wait()
        return super()._ask(offset, length, status=status)

    def _take_one(self) -> None:
        """Take one reply or part of a reply. Raises HypervisorError if its request failed."""
        with self._safely():
            self._take_answer()

    def _take_simple(self, head: bytes) -> None:
        _, error, handle = wire.SIMPLE.unpack(head)
        # A request that returns no data needs only a simple reply.
        if handle in self._writing and not error:
            self._end(handle)
        else:
            super()._take_simple(head)

    def _end(self, handle: int, error: str | None = None) -> None:
        super()._end(handle, error)
        if handle not in self._writing:
            return
        kind, request = self._writing.pop(handle)
        if kind == wire.CMD_WRITE:
            self._much -= request.length
        if request.error is not None:
            end = request.offset + request.length
            where = "" if kind == wire.CMD_FLUSH else f" {request.offset} to {end}"
            raise self._said.error(f"{_WORDS[kind]}{where}: {request.error}")


_STATE = "vmckpt-standby"
_EXPORT = "vmckpt-disk-"
_CAPABILITIES = {EVENTS: False}
_PRIVATE = "private-"
_PATIENCE = Seconds(10.0)
_WAITS = "inmigrate"
_EPOCHS = 512 * MIB
"""Memory that must remain for epochs in flight."""


def socket_of(folder: Path) -> Path:
    """Return the path of the socket on which QEMU serves a standby's disks to the agent and to a
    failover test."""
    return folder / "served" / "disks.sock"


class Standby:
    """A waiting standby, with its memory mapped and its disks open for writing.

    Use as `with Standby(monitor, disks, folder, owner) as standby`. QEMU keeps waiting after the
    block, unless `run` or `load` was called.
    """

    def __init__(
        self, monitor: QmpMonitor, disks: tuple[Disk, ...], folder: Path, owner: tuple[int, int],
        *, private: Sequence[tuple[str, int]] | None = None, kept_in: Path | None = None,
    ) -> None:  # fmt: skip
        """`folder`: the directory of the protection's files; `owner`: QEMU's user and group IDs.

        `private`: name and size of the blocks that are loaded with the device state; None: QEMU's
        own stream contains them. `kept_in`: the directory on tmpfs that has their content for
        later agents; None: it is needed only by this object.
        """
        self._monitor, self._disks, self._owner = monitor, disks, owner
        self._private, self._kept_in = private, kept_in
        self._socket = socket_of(folder)
        self._stack = ExitStack()
        self._state = -1
        self._files: dict[str, Mapping] = {}
        """The memory files, by name."""
        self._loaded: list[Mapping] = []
        """The private blocks."""
        self.memory: list[Mapping] = []
        """The standby's memory files, then the private blocks; writable."""
        self.disks: list[NbdWriter] = []
        self.nodes: list[str] = []
        """QEMU's node names for the disks."""

    def __enter__(self) -> Self:
        """Map the memory and open the disks.

        Raises HypervisorError, also if QEMU is not waiting, CannotCapture if the memory cannot be
        mapped, and OSError.
        """
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        monitor = self._monitor
        state = monitor.run_state()
        if state != _WAITS:
            raise HypervisorError(
                f"{monitor.name} on {monitor.host} is not a waiting standby: it is {state}",
                host=monitor.host,
                hint="run vmckpt recover",
            )
        self._map()
        self._export()
        # This is not a pipe: once QEMU has begun to load the state, it must get the complete state,
        # even if this agent dies.
        self._state = os.memfd_create(_STATE, os.MFD_CLOEXEC)
        self._stack.callback(os.close, self._state)
        with suppress(HypervisorError):  # an earlier agent may have passed a file
            monitor.tell("closefd", {"fdname": _STATE})
        monitor.tell("getfd", {"fdname": _STATE}, files=(self._state,))
        without_shared = self._private is None
        migration_settings.set_capabilities(
            monitor, {IGNORE_SHARED: without_shared, **_CAPABILITIES}
        )

    def fit(self, layout: Layout) -> bool:
        """Plug in the DIMMs that the guest has and the standby lacks.

        Returns whether `memory` has changed; new blocks are zero. Raises HypervisorError, also if
        the memory is then not the guest's, BadInput if this host has too little memory,
        CannotCapture if the memory cannot be mapped, OSError.
        """
        monitor = self._monitor
        told = monitor.ask("qom-list", path="/machine/peripheral")
        there = {one["name"] for one in told}
        for one in layout.dimms:
            if one.name not in there:
                _require_room(one, monitor.host)
                nodes = standby_xml.has_nodes(monitor.described())
                libvirt_side.plug(monitor, standby_xml.dimm(one, nodes=nodes))
        before = len(self.memory)
        if layout.dimms:
            self._map_files()
        private = self._private or ()
        blocks = [*((name, one.size) for name, one in self._files.items()), *private]
        if (why := difference(layout.blocks, blocks)) is not None:
            raise HypervisorError(f"{monitor.name} on {monitor.host}: {why}", host=monitor.host)
        return len(self.memory) != before

    def _map(self) -> None:
        for number, (_, size) in enumerate(self._private or ()):
            self._loaded.append(self._mapped(self._private_file(number), size))
        self._map_files()

    def _map_files(self) -> None:
        """Map the memory files that are not mapped yet."""
        monitor, known = self._monitor, self._files
        memfd = self._private is not None
        with identity.require(monitor.guest, monitor.name, monitor.host) as process:
            self._files = {
                file.names[0]:
                    known.get(file.names[0]) or self._mapped(file.open(os.O_RDWR), file.size)
                for file in memory_files.files(monitor, process, memfd=memfd)
            }  # fmt: skip
        self.memory = [*self._files.values(), *self._loaded]

    def _mapped(self, opened: int, size: int) -> Mapping:
        try:
            # On a full tmpfs, writing to a hole would kill this process in the middle of an epoch.
            os.posix_fallocate(opened, 0, size)
            return self._stack.enter_context(Mapping(opened, size, write=True))
        finally:
            os.close(opened)

    def _private_file(self, number: int) -> int:
        name = f"{_PRIVATE}{number}"
        if self._kept_in is None:
            return os.memfd_create(name, os.MFD_CLOEXEC)
        self._kept_in.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._kept_in / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _export(self) -> None:
        if not self._disks:
            return
        monitor = self._monitor
        inserted = [one.get("inserted") for one in monitor.ask("query-block")]
        named = {one["file"]: one["node-name"] for one in inserted if one and not one.get("ro")}
        # An earlier agent's requests in flight must be complete before this agent writes.
        with suppress(HypervisorError):
            monitor.tell("nbd-server-stop", {})
        qemu_user.make_folder(self._socket.parent, self._owner)
        self._socket.unlink(missing_ok=True)
        place = {"type": "unix", "data": {"path": str(self._socket)}}
        # For the connections of the agent and of a failover test that reads the disks.
        most = 2 * len(self._disks) + 4
        monitor.tell("nbd-server-start", {"addr": place, "max-connections": most})
        for number, disk in enumerate(self._disks):
            name = f"{_EXPORT}{number}"
            self.nodes.append(named[disk.path])
            told: dict[str, object] = {"type": "nbd", "id": name, "name": name}
            told |= {"node-name": self.nodes[-1], "writable": True}
            monitor.tell("block-export-add", told)
            writer = NbdWriter(Unix(str(self._socket)), name, host=monitor.host)
            self.disks.append(self._stack.enter_context(writer))

    def run(self, state: bytes, beginning: Callable[[], None] = lambda: None) -> dict[str, Seconds]:
        """Load device state and start the guest. Returns how long each step took.

        `beginning` is called after the state is loaded and before the guest runs. The epoch must
        already be applied to memory and disks. Raises HypervisorError, CaptureFailed, OSError.
        """
        monitor = self._monitor
        marks = [("begin", time.monotonic())]
        for disk in self.disks:
            disk.close()
        if self._disks:
            monitor.tell("nbd-server-stop", {})
        marks.append(("disks", time.monotonic()))
        self.load(state)
        marks.append(("load", time.monotonic()))
        beginning()
        go_on(monitor)
        marks.append(("run", time.monotonic()))
        return {after[0]: Seconds(after[1] - before[1]) for before, after in pairwise(marks)}

    def load(self, state: bytes) -> None:
        """Load device state, which is possible only once. Does not start the guest.

        Raises HypervisorError, CaptureFailed, OSError.
        """
        if self._private is not None:
            state = device_state.with_pages(state, self.memory[-len(self._private) :])
        done = 0
        while done < len(state):  # pwrite leaves the file offset at 0, where QEMU begins to read
            done += os.pwrite(self._state, memoryview(state)[done:], done)
        self._monitor.tell("migrate-incoming", {"uri": f"fd:{_STATE}"})
        self._wait()

    def _wait(self) -> None:
        give_up = time.monotonic() + _PATIENCE
        while (state := self._monitor.run_state()) == _WAITS:
            told = self._monitor.ask("query-migrate")
            if told.get("status") == "failed" or time.monotonic() > give_up:
                raise CaptureFailed(
                    f"{self._monitor.name} on {self._monitor.host} did not load the device state:"
                    f" {told.get('error-desc', told.get('status', 'no reason reported'))}",
                    hint=f"see /var/log/libvirt/qemu/{self._monitor.name}.log on that host",
                )
        if state not in ("paused", "postmigrate", "prelaunch"):
            raise CaptureFailed(
                f"{self._monitor.name} on {self._monitor.host} is in state {state!r} after loading"
                " its device state"
            )


def _require_room(one: Dimm, host: str) -> None:
    """Raise BadInput if a host has too little memory for a DIMM."""
    free = memory_files.available()
    wanted = Bytes(one.size + _EPOCHS)
    if free < wanted:
        raise BadInput(
            f"{host} has {show_bytes(free)} of free memory; the new memory of the guest needs"
            f" {show_bytes(wanted)}, including memory for epochs in flight",
            hint="shut down another guest on that host, or unplug the memory",
        )


def go_on(monitor: QmpMonitor) -> None:
    """Start a standby that has its device state. Raises HypervisorError."""
    migration_settings.set_capabilities(monitor, {IGNORE_SHARED: False, EVENTS: True})
    monitor.resume()


def announce(monitor: QmpMonitor, cards: list[str]) -> None:
    """Bring up the links of the network cards, and announce the guest to switches.

    `cards`: their names in QEMU. Raises HypervisorError.
    """
    for card in cards:
        monitor.tell("set_link", {"name": card, "up": True})
    order = {"initial": 50, "max": 550, "rounds": 5, "step": 100}
    monitor.tell("announce-self", dict[str, object](order))


def settle(monitor: QmpMonitor, xml: str, *, autostart: bool = False) -> None:
    """Turn a standby whose guest is running into an ordinary guest in libvirt.

    `xml`: the persistent definition to store; empty: none. `autostart`: the guest starts with its
    host. Raises HypervisorError.
    """
    if xml:
        libvirt_side.define(xml, host=monitor.host, uri=monitor.uri, autostart=autostart)
    libvirt_side.links_up(monitor, standby_xml.plugged(monitor.described()))
    libvirt_side.forget_mark(monitor, standby_xml.MARK)
