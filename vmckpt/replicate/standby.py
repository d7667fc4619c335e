"""The waiting standby on the backup: a QEMU with the guest's memory mapped, which has not begun.

Its links are down and its disks are exported for us to write. Device state comes last: once it is
loaded the guest runs from the last committed epoch. QEMU can be given that only once.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Self

from vmckpt.capture import migration_settings
from vmckpt.capture.memory import memory_files
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.migration_settings import EVENTS, IGNORE_SHARED
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import CaptureFailed, HypervisorError
from vmckpt.hypervisor import qemu_user
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import Monitor
from vmckpt.replicate import standby_xml
from vmckpt.replicate.facts import Disk
from vmckpt.replicate.nbdwriter import NbdWriter
from vmckpt.units import Seconds

_STATE = "vmckpt-standby"
_EXPORT = "vmckpt-disk-"
_CAPABILITIES = {IGNORE_SHARED: True, EVENTS: False}
_PATIENCE = Seconds(10.0)
_WAITS = "inmigrate"


def socket_of(folder: Path) -> Path:
    """Where QEMU serves a standby's disks to us, and to a test of it."""
    return folder / "served" / "disks.sock"


class Standby:
    """Use as `with Standby(monitor, disks, folder, owner) as standby`: QEMU is left waiting."""

    def __init__(
        self, monitor: Monitor, disks: tuple[Disk, ...], folder: Path, owner: tuple[int, int]
    ) -> None:
        """`folder`: with all of the protection's files there; QEMU runs as `owner`."""
        self._monitor, self._disks, self._owner = monitor, disks, owner
        self._socket = socket_of(folder)
        self._stack = ExitStack()
        self._state = -1
        self.memory: list[Mapping] = []
        """Its files of memory, to be written."""
        self.disks: list[NbdWriter] = []
        self.nodes: list[str] = []
        """QEMU's names of its disks."""

    def __enter__(self) -> Self:
        """Raises HypervisorError, CannotCapture if its memory cannot be had."""
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
                f"{monitor.name} on {monitor.host} is no waiting standby: it is {state}",
                host=monitor.host,
                mend="run vmckpt recover",
            )
        self._map()
        self._export()
        # No pipe: a QEMU that has begun to load must have all of it, whatever becomes of us.
        self._state = os.memfd_create(_STATE, os.MFD_CLOEXEC)
        self._stack.callback(os.close, self._state)
        with suppress(HypervisorError):  # an agent before us may have given it one
            monitor.tell("closefd", {"fdname": _STATE})
        monitor.tell("getfd", {"fdname": _STATE}, files=(self._state,))
        migration_settings.set_capabilities(monitor, _CAPABILITIES)

    def _map(self) -> None:
        monitor = self._monitor
        with identity.require(monitor.guest, monitor.name, monitor.host) as process:
            for file in memory_files.files(monitor, process):
                opened = file.open(os.O_RDWR)
                try:
                    # A hole that a full tmpfs cannot fill would kill us in the middle of an epoch.
                    os.posix_fallocate(opened, 0, file.size)
                    self.memory.append(
                        self._stack.enter_context(Mapping(opened, file.size, write=True))
                    )
                finally:
                    os.close(opened)

    def _export(self) -> None:
        if not self._disks:
            return
        monitor = self._monitor
        inserted = [one.get("inserted") for one in monitor.ask("query-block")]
        named = {one["file"]: one["node-name"] for one in inserted if one and not one.get("ro")}
        # What an agent before us has under way must end before we write.
        with suppress(HypervisorError):
            monitor.tell("nbd-server-stop", {})
        qemu_user.make_folder(self._socket.parent, self._owner)
        self._socket.unlink(missing_ok=True)
        place = {"type": "unix", "data": {"path": str(self._socket)}}
        # Ours, and those of a test that reads them.
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
        """Load device state and let the guest run: what each step took. `beginning` is called when
        it has all and does not run yet.

        All of the epoch must be in memory and on disks. Raises HypervisorError, CaptureFailed.
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
        """Give it device state, once; it does not run yet.

        Raises HypervisorError, CaptureFailed.
        """
        done = 0
        while done < len(state):  # at a place of its own: QEMU reads from the beginning
            done += os.pwrite(self._state, memoryview(state)[done:], done)
        self._monitor.tell("migrate-incoming", {"uri": f"fd:{_STATE}"})
        self._wait()

    def _wait(self) -> None:
        give_up = time.monotonic() + _PATIENCE
        while (state := self._monitor.run_state()) == _WAITS:
            told = self._monitor.ask("query-migrate")
            if told.get("status") == "failed" or time.monotonic() > give_up:
                raise CaptureFailed(
                    f"{self._monitor.name} on {self._monitor.host} does not take the device state:"
                    f" {told.get('error-desc', told.get('status', 'no word'))}",
                    mend="look at QEMU's log there",
                )
        if state not in ("paused", "postmigrate", "prelaunch"):
            raise CaptureFailed(f"{self._monitor.name} on {self._monitor.host} is {state}")


def go_on(monitor: Monitor) -> None:
    """Let a standby run that has its device state. Raises HypervisorError."""
    migration_settings.set_capabilities(monitor, {IGNORE_SHARED: False, EVENTS: True})
    monitor.resume()


def announce(monitor: Monitor, cards: list[str]) -> None:
    """Plug the network in and tell switches where the guest is now. Raises HypervisorError."""
    for card in cards:
        monitor.tell("set_link", {"name": card, "up": True})
    order = {"initial": 50, "max": 550, "rounds": 5, "step": 100}
    monitor.tell("announce-self", dict[str, object](order))


def settle(monitor: Monitor, xml: str, *, autostart: bool = False) -> None:
    """libvirt describes the guest as an ordinary one, which it is now; `xml`: what is stored of it,
    empty: nothing. Raises HypervisorError."""
    if xml:
        libvirt_side.define(xml, host=monitor.host, uri=monitor.uri, autostart=autostart)
    libvirt_side.links_up(monitor, standby_xml.plugged(monitor.described()))
    libvirt_side.forget_mark(monitor, standby_xml.MARK)
