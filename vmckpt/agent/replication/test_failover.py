"""Failover tests: run a copy of the standby beside the standby, while the protection continues.

The standby itself never loads device state. Long steps run in a separate thread. The backup's loop
pauses only for a moment, during which the copy is brought to the state of one epoch.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

from vmckpt.agent.replication import test_failover_files
from vmckpt.agent.replication.test_failover_files import Traces
from vmckpt.capture import free_space as free_spaces
from vmckpt.errors import BadInput, Cancelled, CaptureFailed, GuestLocked, VmckptError
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.backup import standby as standbys
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.backup.redo_log import Memory
from vmckpt.replication.backup.standby import Standby, socket_of
from vmckpt.replication.session import Session, private_blocks
from vmckpt.replication.test_failover import disk_copy, domain_xml, memory_check, memory_copy
from vmckpt.replication.test_failover.disk_copy import Fleece
from vmckpt.replication.test_failover.memory_check import Room
from vmckpt.replication.test_failover.memory_copy import Next, Touched
from vmckpt.replication.test_failover.pause import LoopPause
from vmckpt.units import Bytes, Seconds

log = logging.getLogger("vmckpt.replica")

_LOOK = Seconds(0.1)
_LOOK_AT_ROOM = Seconds(1.0)
_YIELD = Seconds(0.001)
"""Pause between two slices of the copy, since pages of an epoch have priority."""


class Phase(StrEnum):
    """The state of a test."""

    COPYING = "copying"
    RUNS = "runs"
    FAILED = "failed"


class Trials:
    """Runs the failover tests of one standby, at most one at a time."""

    def __init__(self, session: Session, folder: Path, stage: Stage, standby: Standby) -> None:
        self._session, self._folder = session, folder
        self._stage, self._standby = stage, standby
        self._standstill = LoopPause()
        self._trial: _Trial | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._over = False

    def turn(self) -> None:
        """Let a waiting test pause the backup's loop; called between two iterations of the loop."""
        self._standstill.turn()

    def begin(self) -> None:
        """Start a test without waiting.

        Raises GuestLocked or BadInput if no test can run, and OSError.
        """
        with self._lock:
            self._must_be_possible()
            self._trial = _Trial(
                self._session, self._folder, self._stage, self._standby, self._standstill
            )
            self._thread = threading.Thread(target=self._trial.run, name="test", daemon=True)
            self._thread.start()

    def _must_be_possible(self) -> None:
        name = self._session.name
        if self._over:
            raise GuestLocked(f"the protection of {name} is ending, or its standby is taking over")
        if self._thread is not None and self._thread.is_alive():
            raise GuestLocked(
                f"a failover test of {name} is already running",
                hint=f"end it first: vmckpt failover {name} --end-test",
            )
        if not self._stage.committed:
            raise GuestLocked(
                f"the standby of {name} on {self._session.host} has no complete epoch yet",
                hint=f"run vmckpt status {name} until it shows the standby as ready, then try"
                " again",
            )
        if (why := memory_check.why_not(_room(self._session, self._standby))) is not None:
            raise BadInput(
                f"{self._session.host} {why}",
                hint="shut down another guest on that host, or use another host for the standby",
            )

    def end(self) -> None:
        """End the test without waiting. `as_json` returns None once the test is removed.

        Raises BadInput if there is no test.
        """
        if self._trial is None or self.as_json() is None:
            raise BadInput(f"no failover test of {self._session.name} is running")
        self._trial.end()
        if self._thread is not None and not self._thread.is_alive():
            self._trial = None  # the test had failed, and the operator has now seen this

    def no_more(self) -> None:
        """Allow no new tests, since the loop has ended. A running test continues."""
        with self._lock:
            self._over = True
        self._standstill.close()

    def close(self) -> None:
        """End the test, and wait until it is removed."""
        self.no_more()
        if self._trial is not None and self._thread is not None:
            self._trial.end()
            self._thread.join()

    def as_json(self) -> dict[str, Any] | None:
        """Return the state of the test; None if there is none. A failed test stays until `end`."""
        if self._trial is None or self._thread is None:
            return None
        told = self._trial.as_json()
        return told if self._thread.is_alive() or told["why"] else None


class _Trial:
    """One failover test; `run` is the body of its thread."""

    def __init__(
        self, session: Session, folder: Path, stage: Stage, standby: Standby, still: LoopPause
    ) -> None:
        self._session, self._folder = session, folder
        self._stage, self._standby, self._still = stage, standby, still
        self._stop = threading.Event()
        self._uuid = str(uuid4())
        self._told: dict[str, Any] = {
            "guest": session.name, "name": None, "uuid": self._uuid, "host": session.host,
            "state": Phase.COPYING, "begun": time.time(), "epoch": None, "taken": None,
            "since": None, "pages_copied": 0, "held_s": None, "why": None,
        }  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return dict(self._told)

    def end(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Run the test until it ends or fails, then remove everything that it created."""
        try:
            test_failover_files.clear(self._session)
            with QmpMonitor(
                self._session.guest, host=self._session.host, uri=self._session.uri
            ) as monitor:
                self._begin(monitor)
            self._watch()
        except (VmckptError, OSError, ValueError) as exc:
            if not self._stop.is_set():
                self._fail(str(exc))
        try:
            test_failover_files.clear(self._session)
        except (VmckptError, OSError) as exc:
            self._fail(f"the test could not be removed: {exc}; the next test retries the removal")

    def _fail(self, why: str) -> None:
        log.warning("the failover test of %s failed: %s", self._session.name, why)
        self._told |= {"state": Phase.FAILED, "why": why}

    def _begin(self, monitor: QmpMonitor) -> None:
        fleeces = self._make(monitor)
        where = {"host": self._session.host, "uri": self._session.uri}
        with (
            QmpMonitor(self._uuid, **where) as copied,
            Standby(
                copied,
                (),
                self._folder,
                self._session.owner,
                private=private_blocks(self._session),
            ) as second,
        ):
            second.load(self._copy(monitor, fleeces, second))
            for card in copied.cards():  # the loaded device state has set their links up
                copied.tell("set_link", {"name": card, "up": False})
            standbys.go_on(copied)
        self._told |= {"state": Phase.RUNS, "since": time.time()}
        log.info("failover test %s started with epoch %d", self._told["name"], self._told["epoch"])

    def _make(self, monitor: QmpMonitor) -> tuple[Fleece, ...]:
        """Create the images, and start a QEMU that waits for the guest's state."""
        session, socket = self._session, socket_of(self._folder)
        xml = monitor.xml()
        where = {"host": session.host, "uri": session.uri}
        self._told["name"] = name = _free_name(session.name, libvirt_side.names(**where))
        firmware = domain_xml.firmware(xml)
        nvram = None if firmware is None else test_failover_files.nvram(firmware)
        fleeces = tuple(
            Fleece(
                number=number,
                export=disk.target,
                node=node,
                image=test_failover_files.changed(disk.path),
            )
            for number, (disk, node) in enumerate(
                zip(session.disks, self._standby.nodes, strict=True)
            )
        )
        images = {disk.target: test_failover_files.overlay(disk.path) for disk in session.disks}
        files = [*(one.image for one in fleeces), *images.values(), *([nvram] if nvram else [])]
        Traces(uuid=self._uuid, name=name, files=tuple(files)).write(Path(session.state))
        test_failover_files.make_images(session, fleeces, socket)
        if firmware is not None and nvram is not None:
            test_failover_files.copy_firmware(firmware, nvram)
        disk_copy.prepare(monitor, fleeces)
        disks = {target: (image, str(socket)) for target, image in images.items()}
        description = domain_xml.copy(
            xml, name=name, uuid=self._uuid, session=session.session, disks=disks, nvram=nvram
        )
        self._go_on()
        libvirt_side.create_paused(description, **where)
        return fleeces

    def _copy(self, monitor: QmpMonitor, fleeces: tuple[Fleece, ...], second: Standby) -> bytes:
        """Bring memory and disks to the state of one epoch. Returns that epoch's device state.

        Raises CaptureFailed, Cancelled.
        """
        source, target = self._standby.memory, second.memory
        if [one.size for one in source] != [one.size for one in target]:
            raise CaptureFailed("the memory sizes of the test guest and the standby differ")
        touched = Touched(source)
        try:
            with self._still.held():
                self._stage.noted = touched
            flags = memory_copy.all_pages(source)
            for rounds in itertools.count():
                memory_copy.copy(source, target, flags, self._between)
                step = memory_copy.decide(touched.count, rounds)
                if step is Next.GIVE_UP:
                    raise CaptureFailed(
                        f"{self._session.name} changes memory faster than it can be copied",
                        hint="try again when the guest is less busy",
                    )
                if step is Next.CUT:
                    state = self._cut(monitor, fleeces, target, touched)
                    if state is not None:
                        return state
                flags = touched.take()
            raise AssertionError("itertools.count never ends")
        finally:
            if self._stage.noted is touched:
                self._stage.noted = None

    def _cut(
        self, monitor: QmpMonitor, fleeces: tuple[Fleece, ...], target: Sequence[Memory],
        touched: Touched,
    ) -> bytes | None:  # fmt: skip
        """Copy the rest while the loop is paused and applies no epoch. Returns the device state.

        Returns None if too much has changed since the last round. Raises CaptureFailed.
        """
        stage = self._stage
        with self._still.held():
            began = time.monotonic()
            if stage.noted is not touched or stage.last is None:
                raise CaptureFailed(
                    f"{self._session.host} is receiving a full copy of {self._session.name}, or"
                    " memory was plugged into the guest",
                    hint=f"run vmckpt status {self._session.name} until it shows the standby as"
                    " ready, then try again",
                )
            if touched.count > memory_copy.MOST:
                return None
            disk_copy.start_copies(monitor, fleeces)
            memory_copy.copy(self._standby.memory, target, touched.take(), self._counted)
            self._told |= {"epoch": stage.committed, "taken": stage.last.taken}
            self._told["held_s"] = time.monotonic() - began
            return stage.state()

    def _counted(self, pages: int) -> None:
        self._told["pages_copied"] += pages

    def _between(self, pages: int) -> None:
        self._counted(pages)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop.wait(_YIELD):
            raise Cancelled("the failover test was stopped")

    def _watch(self) -> None:
        """Wait until the test stops or must be stopped. Raises CaptureFailed if space runs out."""
        process = identity.hold(self._uuid)
        if process is None:
            return
        with process:
            looked = time.monotonic()
            while not self._stop.is_set() and not process.ended(_LOOK):
                if time.monotonic() - looked > _LOOK_AT_ROOM:
                    looked = time.monotonic()
                    self._look_at_room()

    def _look_at_room(self) -> None:
        free = _beside_images(self._session)
        if free is not None and memory_check.runs_out(free):
            raise CaptureFailed(
                f"the failover test was stopped: {self._session.host} has hardly any space left for"
                " the standby's images",
                hint="free some space on that host",
            )


def _free_name(guest: str, taken: frozenset[str]) -> str:
    names = itertools.chain([f"{guest}-test"], (f"{guest}-test{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _room(session: Session, standby: Standby) -> Room:
    return Room(
        wanted=Bytes(sum(one.size for one in standby.memory)),
        shared=Bytes(min(_free_of(one.file) for one in standby.memory)),
        memory=_available(_meminfo()),
        disks=_beside_images(session),
    )


def _free_of(file: int) -> int:
    stat = os.fstatvfs(file)
    # The file system of a memfd has no size of its own.
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else _available(_meminfo())


def _meminfo() -> str:
    return Path("/proc/meminfo").read_text()


def _available(meminfo: str) -> Bytes:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return Bytes(int(line.split()[1]) << 10)
    return Bytes(0)


def _beside_images(session: Session) -> Bytes | None:
    free = [free_spaces.free(Path(disk.path).parent) for disk in session.disks]
    return min(free) if free else None
