"""Capture a guest whose memory is in files: stop, device state, changed pages, resume.

QEMU leaves shared memory out of its stream; meanwhile the changed pages are found by comparing with
the last copy. The capability for that is on only while the guest is paused: left on, it would make
the next `virsh save` lose the memory.

The last copy consists of files beside the guest's memory. It is also the frozen image of one epoch;
while it is being updated it holds none. What finds it so can still use it, but cannot tell what has
changed since.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Table
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from vmckpt.capture import migration_settings
from vmckpt.capture.disks.bitmaps import Activation
from vmckpt.capture.memory import image, memory_files
from vmckpt.capture.memory.background_snapshot import Hooks, undo_process_for
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Flags, Mapping, bring_up
from vmckpt.capture.memory.pipe_reader import Drain, Tape
from vmckpt.capture.migration_settings import IGNORE_SHARED, PIPE, Commands, Undo
from vmckpt.capture.qemu_stream.header import PAGE, Head
from vmckpt.capture.qemu_stream.stream import Addresses, Pages, StreamParser
from vmckpt.errors import Cancelled, CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.units import Seconds

_STATE = "last.json"
# A guest's memory apart from that of its files: firmware, graphics cards.
_MOST_PRIVATE = 256 << 20


class MemoryReplica:
    """Open it with `with MemoryReplica(...)`; one process at a time."""

    def __init__(self, folder: Path, files: Sequence[MemoryFile], identity: str) -> None:
        """`identity` is that of the QEMU process; the copy of another one is removed."""
        self.folder = folder
        self._identity = identity
        self._files = files
        self.epoch = self._epoch()
        """That it holds; None: none, or a part of one."""
        if self.epoch is None and not self._ours():
            image.remove(folder)
            folder.mkdir(mode=0o700, parents=True)
        self.mappings: list[Mapping] = []
        try:
            for index, file in enumerate(files):
                opened = os.open(folder / _name(index), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    os.ftruncate(opened, file.size)
                    self.mappings.append(Mapping(opened, file.size, write=True))
                finally:
                    os.close(opened)
        except BaseException:
            self.close()
            raise
        if self.epoch is None:
            self._write(None)

    def __enter__(self) -> "MemoryReplica":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for mapping in self.mappings:
            mapping.close()
        self.mappings = []

    def tear(self) -> None:
        """It is about to change: from now on it holds no epoch."""
        self.epoch = None
        self._write(None)

    def complete(
        self, epoch: int, stream: "DeviceStateSink"
    ) -> tuple[FrozenImage, dict[str, Flags]]:
        """It holds this epoch now; the image, and what changed in memory that is in no file."""
        head = stream.taken()
        (self.folder / image.HEAD).write_bytes(head.written(without_shared=head.without_shared))
        (self.folder / image.TAIL).write_bytes(stream.tail_bytes)
        names: list[str] = []
        present: list[Flags] = []
        changed: dict[str, Flags] = {}
        for index, block in enumerate(head.blocks):
            shared = stream.shared.get(index)
            if shared is not None:
                names.append(_name(shared))
                present.append(self.mappings[shared].held())
                continue
            names.append(f"private-{index}")
            data = stream.private[index]
            present.append(np.asarray(data.any(axis=1)))
            changed[block.name] = _replace(self.folder / names[-1], data)
        made = image.complete(self.folder, head, names, present)
        self.epoch = epoch
        self._write(epoch)
        return made, changed

    def _state(self) -> dict[str, object]:
        try:
            told = json.loads((self.folder / _STATE).read_text())
        except (OSError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}

    def _ours(self) -> bool:
        sizes = [file.size for file in self._files]
        state = self._state()
        return state.get("of") == self._identity and state.get("sizes") == sizes

    def _epoch(self) -> int | None:
        told = self._state().get("epoch")
        return told if isinstance(told, int) and self._ours() else None

    def _write(self, epoch: int | None) -> None:
        if epoch is None:
            with suppress(FileNotFoundError):
                (self.folder / image.INDEX).unlink()
        sizes = [file.size for file in self._files]
        partial = self.folder / f"{_STATE}.new"
        partial.write_text(json.dumps({"of": self._identity, "sizes": sizes, "epoch": epoch}))
        partial.rename(self.folder / _STATE)


def _name(index: int) -> str:
    return f"shared-{index}"


def _replace(path: Path, data: Pages) -> Flags:
    """Write a block as a file; which of its pages differ from those that were there."""
    flat = data.reshape(-1)
    try:
        old = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        old = np.zeros(0, dtype=np.uint8)
    known = len(old) == len(flat)
    changed: Flags = (
        (old.reshape(-1, PAGE) != data).any(axis=1) if known else np.ones(len(data), dtype=np.bool_)
    )
    if changed.any():
        flat.tofile(path)
    return changed


class DeviceStateSink:
    """A sink (`stream.Sink`) for a stream without shared memory: the little that is left."""

    def __init__(self, files: Sequence[MemoryFile]) -> None:
        self._files = files
        self._head: Head | None = None
        self.shared: dict[int, int] = {}
        """The number of the file for each block that is one."""
        self.private: dict[int, Pages] = {}
        self.tail_bytes = bytearray()

    def begin(self, head: Head) -> None:
        """Raises CaptureFailed if the blocks are not those of the files."""
        self._head = head
        by_name: Table[str, int] = {
            name: index for index, file in enumerate(self._files) for name in file.names
        }
        for index, block in enumerate(head.blocks):
            number = by_name.get(block.name)
            if number is None:
                self.private[index] = np.zeros((block.size // PAGE, PAGE), dtype=np.uint8)
            elif self._files[number].size == block.size:
                self.shared[index] = number
        if len(self.shared) != len(self._files) or not head.without_shared:
            raise CaptureFailed(
                "the stream's list of memory is not that of the guest's files",
                hint="use another way of capture",
            )
        if sum(len(data) for data in self.private.values()) * PAGE > _MOST_PRIVATE:
            raise CaptureFailed("too much of its memory is in no file", hint="use another way")

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        """Raises CaptureFailed if QEMU sends what it should have left out."""
        self._private(block)[addresses // PAGE] = data

    def zeros(self, block: int, addresses: Addresses) -> None:
        self._private(block)[addresses // PAGE] = 0

    def tail(self, data: memoryview) -> None:
        self.tail_bytes += data

    def taken(self) -> Head:
        if self._head is None:
            raise CaptureFailed("a stream without a head", hint="capture the guest again")
        return self._head

    def _private(self, block: int) -> Pages:
        if block not in self.private:
            raise CaptureFailed(
                "QEMU sent memory that it shares with us", hint="use another way of capture"
            )
        return self.private[block]


# For device state: milliseconds, unless the host hardly runs.
_PATIENCE = Seconds(10.0)
_LOOK = Seconds(0.02)
"""So often a stream that has ended is asked whether it has failed."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Marks = list[tuple[str, float]]
"""Names of steps and when each had ended."""
Mark = Callable[[str], None]


class Comparison(Protocol[T_co]):
    """What finds the changed pages, under way."""

    def result(self) -> T_co:
        """Wait for it."""


class Resumed(CaptureFailed):
    """Another program let the guest run in the middle of the pause: what was captured is not of one
    moment. It can be taken again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="do not resume it meanwhile: virsh resume lets it run")
        self.found: object = None
        """What the comparison found, which holds these for changes that it has seen."""


class PausedCapture:
    """One epoch's pause. The pipe must have been handed over, and the facts noted."""

    def __init__(self, monitor: Commands, undo: Undo, drain: Drain) -> None:
        self._monitor = monitor
        self._undo = undo
        self._drain = drain
        self.marks: Marks = []

    def take(
        self,
        compare: Callable[[], Comparison[T]],
        barrier: Callable[[Mark], None],
        *,
        goes_on: bool = True,
    ) -> T:
        """From stop to cont. `compare` begins to look for changes once nobody writes memory any
        more; `barrier` is called once the device state is out. Unless `goes_on` it stands still
        after it. Raises HypervisorError, CaptureFailed: then it may stand still, too; and Resumed.
        """
        monitor = self._monitor
        self.mark("begin")
        monitor.tell("stop", {})
        self.mark("stop")
        # QEMU writes no memory any more: the devices were drained, and their state is only read.
        comparing = compare()
        try:
            off = {name: not on for name, on in self._undo.capabilities.items()}
            migration_settings.set_capabilities(monitor, off)
            monitor.tell("migrate", {"uri": f"fd:{PIPE}"})
            self._wait()
            self.mark("device state")
            barrier(self.mark)
            found = comparing.result()
            self.mark("compare")
            self._must_stand()
        except Resumed as exc:
            exc.found = comparing.result()
            raise
        migration_settings.set_capabilities(monitor, self._undo.capabilities)
        if goes_on:
            monitor.tell("cont", {})
        self.mark("cont")
        return found

    def mark(self, step: str) -> None:
        """Note that a step has ended."""
        self.marks.append((step, time.monotonic()))

    def _wait(self) -> None:
        """Until QEMU has wholly ended its migration: a `cont` before that may crash it."""
        if not self._drain.ended(_PATIENCE):
            raise self._failed("the stream does not end")
        began = looked = time.monotonic()
        while (state := self._monitor.run_state()) != "postmigrate":
            now = time.monotonic()
            if state == "running":
                raise self._resumed()
            if state not in ("paused", "finish-migrate") or now - began > _PATIENCE:
                raise self._failed(f"it is {state}")
            if now - looked < _LOOK:
                continue  # each question takes a tenth of the time that is left
            looked = now
            self._migration_status()
        # A migration of a guest that stood still ends in that run state even if it failed: what
        # came then is a part of the device state, from which no standby could go on.
        if self._migration_status() != "completed":
            raise self._failed("QEMU does not say that its device state is complete")

    def _migration_status(self) -> str:
        """The status by `query-migrate`. Raises CaptureFailed if the migration has failed."""
        told = self._monitor.ask("query-migrate")
        status = str(told.get("status"))
        if status in ("failed", "cancelled"):
            raise self._failed(migration_settings.why_failed(told))
        return status

    def _must_stand(self) -> None:
        """It has stood still all the time: any other run state than that of a migration that has
        ended says that somebody let it run. Raises Resumed."""
        if self._monitor.run_state() != "postmigrate":
            raise self._resumed()

    def _resumed(self) -> Resumed:
        return Resumed(
            f"{self._monitor.name} on {self._monitor.host} was resumed while it was captured"
        )

    def _failed(self, why: str) -> CaptureFailed:
        return migration_settings.capture_failed(self._monitor, why)


# One processor is for QEMU and libvirt, which are at work on the same pause.
_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))


def _barrier(monitor: Commands, hooks: Hooks) -> Callable[[Mark], None]:
    """What is done for disks while the guest stands still."""
    activation = Activation.of(monitor)

    def at_barrier(mark: Mark) -> None:
        if hooks.barrier is not None:
            activation.carry_out(monitor)
            mark("activation")
            hooks.barrier()
            mark("barrier")

    return at_barrier


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCaptured:
    """One epoch. The image is good until the next capture."""

    image: FrozenImage
    epoch: int
    changed: dict[str, Flags] | None
    """For each block, which pages changed since the last epoch; None: all of them may have."""
    pause: Seconds
    phases: dict[str, Seconds]
    """What the pause was made of, one step after the other."""


class SharedMemory:
    """A guest's memory and its last copy, ready for one capture after the other.

    Use as `with SharedMemory(monitor, folder) as memory`. `folder` keeps the last copy, also from
    one run to the next, and should be on tmpfs.
    """

    def __init__(self, monitor: Commands, folder: Path) -> None:
        """Raises CannotCapture if the guest's memory cannot be shared with us."""
        self._monitor = monitor
        self._live: list[Mapping] = []
        self._held: list[Flags] = []
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="compare")
        with identity.require(monitor.guest, monitor.name, monitor.host) as qemu:
            self._files = memory_files.files(monitor, qemu)
            started = memory_files.start_time(qemu.pid)
            self._last = MemoryReplica(folder, self._files, f"{monitor.guest} {qemu.pid} {started}")
            try:
                for file in self._files:
                    self._live.append(self._map(file))
            except BaseException:
                self.close()
                raise

    def _map(self, file: memory_files.MemoryFile) -> Mapping:
        try:
            opened = file.open(os.O_RDONLY)
        except OSError as exc:
            raise CannotCapture(
                f"{self._monitor.name} on {self._monitor.host}: its memory {file.names[0]!r}"
                f" cannot be opened: {exc}",
                hint="run as root on that host",
            ) from exc
        try:
            return Mapping(opened, file.size)
        finally:
            os.close(opened)

    def __enter__(self) -> "SharedMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the files go; the last copy stays."""
        self._pool.shutdown()
        for mapping in self._live:
            mapping.close()
        self._last.close()

    @property
    def epoch(self) -> int | None:
        """Which epoch the last copy holds."""
        return self._last.epoch

    def capture(
        self, epoch: int, hooks: Hooks, *, stop: threading.Event | None = None
    ) -> SharedCaptured:
        """Capture a running guest, which runs on afterwards.

        Raises CannotCapture, CaptureFailed, HypervisorError or Cancelled; it runs on then, too.
        """
        monitor = self._monitor
        if monitor.run_state() != "running":
            raise CannotCapture(
                f"{monitor.name} on {monitor.host} stands still, and after such a capture QEMU"
                " would let nobody save or migrate it",
                hint="use the background snapshot",
            )
        undo = migration_settings.settings_facts(
            monitor, want=IGNORE_SHARED, runs=True, folder=None
        )
        hooks.note(undo)
        known = self._last.epoch is not None
        self._last.tear()
        tape = Tape()
        with Drain(tape) as drain, undo_process_for(monitor, undo, None, hooks.held) as keeper:
            try:
                changed = self._warm()
                if stop is not None and stop.is_set():
                    raise Cancelled(f"capture of {monitor.name} stopped")
                migration_settings.set_bandwidth(monitor, migration_settings.NO_LIMIT)
                drain.hand_over(monitor)
                standstill = PausedCapture(monitor, undo, drain)
                found = standstill.take(self._begin_comparing, _barrier(monitor, hooks))
                hooks.captured()
            except BaseException:
                drain.discard()
                with suppress(HypervisorError, CaptureFailed):
                    migration_settings.break_off(monitor, undo)
                    keeper.all_well()
                raise
            migration_settings.set_bandwidth(monitor, undo.bandwidth)
            keeper.all_well()
        sink = DeviceStateSink(self._files)
        parser = StreamParser(sink)
        parser.feed(tape.data)
        parser.finish()
        image, private = self._last.complete(epoch, sink)
        for index, flags in enumerate(found):
            changed[index] |= flags
        named = {image.blocks[block].name: changed[file] for block, file in sink.shared.items()}
        return SharedCaptured(
            image=image, epoch=epoch, changed=named | private if known else None,
            pause=Seconds(standstill.marks[-1][1] - standstill.marks[0][1]),
            phases={b[0]: Seconds(b[1] - a[1]) for a, b in pairwise(standstill.marks)},
        )  # fmt: skip

    def _warm(self) -> list[Flags]:
        """Bring the last copy up while the guest still runs, so that little is left to copy."""
        self._held = [live.held() for live in self._live]
        for live, last, held in zip(self._live, self._last.mappings, self._held, strict=True):
            live.populate(held)
            last.populate(last.written)
        return self._compare()

    def _compare(self) -> list[Flags]:
        together = zip(self._live, self._last.mappings, self._held, strict=True)
        return [bring_up(live, last, self._pool, expected=held) for live, last, held in together]

    def _begin_comparing(self) -> "Future[list[Flags]]":
        future: Future[list[Flags]] = Future()

        def run() -> None:
            try:
                future.set_result(self._compare())
            except Exception as exc:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(exc)

        threading.Thread(target=run, name="comparing", daemon=True).start()
        return future
