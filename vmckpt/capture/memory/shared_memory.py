"""Capture a guest whose memory is in files: pause, save device state, find changed pages, resume.

The capability x-ignore-shared makes QEMU leave shared memory out of its stream. Meanwhile, changed
pages are found by comparing memory with the last copy. The capability is on only while the guest is
paused; if it stayed on, the next `virsh save` would lose the memory.

The last copy consists of files on tmpfs. Except while it is being updated, the last copy is also
the frozen image of one epoch. A copy whose update was interrupted can still be used, but then the
pages that have changed since the last complete epoch are unknown.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Table
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from vmckpt.units import Seconds, show_bytes
from vmckpt.util import thread_call

_STATE = "last.json"
# Maximum size of guest memory that is not in files, such as firmware and video memory.
_MOST_PRIVATE = 256 << 20


class MemoryReplica:
    """The last copy of a guest's memory. Use as `with MemoryReplica(...)`, in one process only."""

    def __init__(self, folder: Path, files: Sequence[MemoryFile], identity: str) -> None:
        """`identity`: identifies the QEMU process; a copy of another process or size is removed.

        Raises OSError.
        """
        self.folder = folder
        self._identity = identity
        self._files = files
        self.epoch = self._epoch()
        """The epoch of the copy; None if the copy is empty or incomplete."""
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
        """Mark the copy as incomplete. Call this before any change to the copy. Raises OSError."""
        self.epoch = None
        self._write(None)

    def complete(
        self, epoch: int, stream: "DeviceStateSink"
    ) -> tuple[FrozenImage, dict[str, Flags]]:
        """Mark the copy as complete, as of `epoch`.

        Returns the frozen image and, for each block that is not in a file, the changed pages.
        Raises CaptureFailed, OSError.
        """
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
    """Write a block to a file. Returns, for each page, whether it differs from the old file."""
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
    """A `stream.Sink` for a stream without shared memory: device state and private memory."""

    def __init__(self, files: Sequence[MemoryFile]) -> None:
        self._files = files
        self._head: Head | None = None
        self.shared: dict[int, int] = {}
        """Index of the memory file, by index of the block."""
        self.private: dict[int, Pages] = {}
        self.tail_bytes = bytearray()

    def begin(self, head: Head) -> None:
        """Match the stream's blocks with the memory files. Raises CaptureFailed on a mismatch."""
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
                "the memory blocks in QEMU's stream do not match the guest's memory files",
                hint="use another capture method: --way background",
            )
        private = sum(len(data) for data in self.private.values()) * PAGE
        if private > _MOST_PRIVATE:
            raise CaptureFailed(
                f"{show_bytes(private)} of the guest's memory are not in files that vmckpt can map;"
                f" the limit is {show_bytes(_MOST_PRIVATE)}",
                hint="use another capture method: --way background",
            )

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        """Store pages of private memory. Raises CaptureFailed if QEMU sends shared memory."""
        self._private(block)[addresses // PAGE] = data

    def zeros(self, block: int, addresses: Addresses) -> None:
        self._private(block)[addresses // PAGE] = 0

    def tail(self, data: memoryview) -> None:
        self.tail_bytes += data

    def taken(self) -> Head:
        if self._head is None:
            raise CaptureFailed("QEMU's stream has no header", hint="try again")
        return self._head

    def _private(self, block: int) -> Pages:
        if block not in self.private:
            raise CaptureFailed(
                "QEMU sent shared memory, which should not be in its stream",
                hint="use another capture method: --way background",
            )
        return self.private[block]


# For device state, which takes milliseconds unless the host is overloaded.
_PATIENCE = Seconds(10.0)
_LOOK = Seconds(0.02)
"""Interval between queries of the migration's status after its stream has ended."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Marks = list[tuple[str, float]]
"""Names of steps, with the time at which each ended."""
Mark = Callable[[str], None]


class Comparison(Protocol[T_co]):
    """A running search for changed pages."""

    def result(self) -> T_co:
        """Wait for the result and return it."""


class Resumed(CaptureFailed):
    """Another tool resumed the guest during the pause, so the capture is inconsistent.

    The capture can be repeated.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="do not resume a guest while it is being captured")
        self.found: object = None
        """Changed pages found by the comparison, which has already updated the last copy."""


class PausedCapture:
    """The pause of one epoch. Before `take`, pass the pipe to QEMU and store the undo record."""

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
        """Pause the guest, capture it, and resume it unless `goes_on` is False.

        `compare` starts the search for changed pages once QEMU no longer writes memory; `barrier`
        is called once the device state is saved. Returns the result of the search. Raises Resumed,
        HypervisorError or CaptureFailed; the guest may still be paused after the latter two.
        """
        monitor = self._monitor
        self.mark("begin")
        monitor.tell("stop", {})
        self.mark("stop")
        # QEMU no longer writes memory: its devices are drained, and their state is only read.
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
        """Record the end of a step."""
        self.marks.append((step, time.monotonic()))

    def _wait(self) -> None:
        """Wait until the migration has completely ended; `cont` before that may crash QEMU.

        Raises CaptureFailed, Resumed.
        """
        if not self._drain.ended(_PATIENCE):
            raise self._failed(f"QEMU did not end its migration stream within {_PATIENCE:g} s")
        began = looked = time.monotonic()
        while (state := self._monitor.run_state()) != "postmigrate":
            now = time.monotonic()
            if state == "running":
                raise self._resumed()
            if state not in ("paused", "finish-migrate") or now - began > _PATIENCE:
                raise self._failed(f"the guest's run state is {state}, not postmigrate")
            if now - looked < _LOOK:
                continue  # each query would prolong the pause
            looked = now
            self._migration_status()
        # A paused guest reaches the run state "postmigrate" even if its migration failed. Then the
        # device state is incomplete, and no standby could start from it.
        if self._migration_status() != "completed":
            raise self._failed("QEMU does not report the device state as completely saved")

    def _migration_status(self) -> str:
        """Query the migration's status. Raises CaptureFailed if the migration has failed."""
        told = self._monitor.ask("query-migrate")
        status = str(told.get("status"))
        if status in ("failed", "cancelled"):
            raise self._failed(migration_settings.why_failed(told))
        return status

    def _must_stand(self) -> None:
        """Check that the guest was paused throughout. Raises Resumed.

        The run state of a guest that was resumed is no longer "postmigrate".
        """
        if self._monitor.run_state() != "postmigrate":
            raise self._resumed()

    def _resumed(self) -> Resumed:
        return Resumed(
            f"{self._monitor.name} on {self._monitor.host} did not stay paused during its capture"
        )

    def _failed(self, why: str) -> CaptureFailed:
        return migration_settings.capture_failed(self._monitor, why)


# One processor is left for QEMU and libvirt, which work during the same pause.
_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))


def _barrier(monitor: Commands, hooks: Hooks) -> Callable[[Mark], None]:
    """Return the function that captures disks while the guest is paused."""
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
    """A captured epoch. The image is valid until the next capture."""

    image: FrozenImage
    epoch: int
    changed: dict[str, Flags] | None
    """For each block, the pages that changed since the last epoch; None if they are unknown."""
    pause: Seconds
    phases: dict[str, Seconds]
    """Duration of each step of the pause, in order."""


class SharedMemory:
    """A guest's memory and its last copy, for repeated captures.

    Use as `with SharedMemory(monitor, folder) as memory`. `folder`: the directory of the last copy,
    which outlives this process; it should be on tmpfs.
    """

    def __init__(self, monitor: Commands, folder: Path) -> None:
        """Map the guest's memory, and open or create its last copy.

        Raises CannotCapture if the memory cannot be mapped, HypervisorError, OSError.
        """
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
                f"{self._monitor.name} on {self._monitor.host}: cannot open its memory file"
                f" {file.names[0]!r}: {exc}",
                hint="let vmckpt log in to that host as root: ssh: {user: root} in the inventory",
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
        """Close the files; the last copy stays."""
        self._pool.shutdown()
        for mapping in self._live:
            mapping.close()
        self._last.close()

    @property
    def epoch(self) -> int | None:
        """The epoch of the last copy; None if the copy is empty or incomplete."""
        return self._last.epoch

    def capture(
        self, epoch: int, hooks: Hooks, *, stop: threading.Event | None = None
    ) -> SharedCaptured:
        """Capture a running guest as `epoch`. The guest continues to run afterwards.

        Raises CannotCapture, CaptureFailed, HypervisorError, OSError or Cancelled; the guest is
        then in its previous state.
        """
        monitor = self._monitor
        if monitor.run_state() != "running":
            raise CannotCapture(
                f"{monitor.name} on {monitor.host} is not running; after a capture with --way"
                " shared, QEMU would refuse to save or migrate the guest",
                hint="use another capture method: --way background",
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
                    raise Cancelled(f"the capture of {monitor.name} was cancelled")
                hooks.ready()
                migration_settings.set_bandwidth(monitor, migration_settings.NO_LIMIT)
                drain.hand_over(monitor)
                standstill = PausedCapture(monitor, undo, drain)
                comparing = partial(thread_call.start, self._compare, name="comparing")
                found = standstill.take(comparing, _barrier(monitor, hooks))
                self._require_same_memory()
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

    def _require_same_memory(self) -> None:
        """Check that no memory was plugged in or unplugged since the files were mapped.

        Raises CannotCapture: the device state does not match the captured memory.
        """
        monitor = self._monitor
        if memory_files.names(monitor) != {file.names[0] for file in self._files}:
            raise memory_files.replugged(monitor)

    def _warm(self) -> list[Flags]:
        """Update the last copy while the guest is still running, so the pause is shorter.

        Returns the pages that had changed in each file.
        """
        self._held = [live.held() for live in self._live]
        for live, last, held in zip(self._live, self._last.mappings, self._held, strict=True):
            live.populate(held)
            last.populate(last.written)
        return self._compare()

    def _compare(self) -> list[Flags]:
        together = zip(self._live, self._last.mappings, self._held, strict=True)
        return [bring_up(live, last, self._pool, expected=held) for live, last, held in together]
