"""Capture a guest's memory by write tracking: read only what was written since the last capture.

Write protection is applied only during a pause of the guest, when QEMU has completed all disk
requests. The kernel writes data that it reads with O_DIRECT to pages that it has pinned before,
whether or not they are protected. If a page were protected in between, this write would be missed.

Most pages are copied while the guest runs. Pages that it writes meanwhile are found by the scan in
the last pause, and copied in that pause. So the image is the memory at the last pause.
"""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture import migration_settings
from vmckpt.capture.memory import copy_rounds, memory_files, page_runs, ram_blocks, tracker
from vmckpt.capture.memory.background_snapshot import Hooks, undo_process_for
from vmckpt.capture.memory.copy_rounds import Progress, Step
from vmckpt.capture.memory.image import FrozenImage, ImageWriter
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.page_runs import Runs
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.memory.ram_blocks import RamBlock
from vmckpt.capture.memory.shared_memory import Resumed
from vmckpt.capture.memory.tracker import LentTracking, TrackerState
from vmckpt.capture.memory.write_tracking import CannotTrack, Why, WriteTracking
from vmckpt.capture.migration_settings import Commands
from vmckpt.capture.qemu_stream import device_state
from vmckpt.capture.qemu_stream.device_state import StateFile
from vmckpt.capture.qemu_stream.header import PAGE, parse_head
from vmckpt.errors import (
    Cancelled,
    CannotCapture,
    CaptureFailed,
    HypervisorError,
    VmckptError,
)
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Seconds, show_bytes, show_seconds
from vmckpt.util import thread_call

Pages = NDArray[np.uint64]
_PIECE = 1024
"""Pages that are copied at once: 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The previous snapshot of the guest in a store, whose unchanged pages are kept."""

    number: int
    """Number of the capture from which the snapshot was made."""
    around: Callable[[str, Flags], Flags]
    """Returns which pages of a block to copy, given the block's name and its written pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedCaptured:
    """A successful capture."""

    image: FrozenImage
    pause: Seconds
    """How long the guest was paused in total."""
    phases: Mapping[str, Seconds]
    """Duration of each step of the last pause, and of the pauses before it."""
    changed: Mapping[str, Flags] | None
    """For each block, the pages that may differ from the previous snapshot; None: any page may."""
    copied: Mapping[str, Flags] | None
    """For each block, the pages that the image contains; None: all pages."""
    warning: str | None = None


class Tracked:
    """The write tracking of a guest during one capture. Use as `with Tracked(…) as tracked`."""

    def __init__(self, monitor: Commands, process: HeldProcess) -> None:
        """Take over the guest's tracking, or begin to track its writes.

        Raises CannotTrack, HypervisorError, GuestLocked, OSError, RemoteError.
        """
        if not device_state.is_possible(monitor):
            raise CannotTrack(process.pid, Why.NOT_SUPPORTED)
        self.backends = memory_files.names(monitor)
        """Names of the guest's memory backends."""
        found = ram_blocks.find(monitor, process)
        self.guest, self.process = monitor.guest, process
        self.blocks = (*found.guest, *found.private)
        self.number: int | None = None
        """Number of the capture since which writes were tracked; None: they were not."""
        self.why = "no process was tracking the guest's writes"
        """Why `number` is None."""
        self._lent: LentTracking | None = None
        with ExitStack() as stack:
            self.writes = stack.enter_context(self._adopted(stack) or self._begun())
            self._stack = stack.pop_all()

    def __enter__(self) -> "Tracked":
        return self

    def __exit__(self, *_: object) -> None:
        """Release the tracking. Without `keep`, the next capture reads all memory."""
        self._stack.close()

    def keep(self, number: int) -> None:
        """Keep tracking after the complete capture `number`, for the next capture.

        Raises OSError, RemoteError, subprocess.CalledProcessError.
        """
        if self._lent is not None:
            self._lent.keep(number)
            return
        state = TrackerState(number, self.blocks)
        tracker.start(self.guest, self.process, state, self.writes.descriptor)

    def _adopted(self, stack: ExitStack) -> WriteTracking | None:
        lent = tracker.take(self.guest, self.process)
        if lent is None:
            return None
        stack.enter_context(lent)
        ranges = [one.range for one in self.blocks]
        writes = WriteTracking(self.process, ranges, lent.descriptor)
        try:
            usable = lent.state.blocks == self.blocks
            if usable:
                writes.scan()
        except CannotTrack:  # memory was unplugged, and other memory plugged at its place
            usable = False
        if not usable:
            self.why = "the layout of the guest's memory has changed"
            writes.close()
            lent.end()
            return None
        self._lent, self.number = lent, lent.state.number
        self.why = "the last snapshot failed or was interrupted"
        return writes

    def _begun(self) -> WriteTracking:
        return WriteTracking(self.process, [one.range for one in self.blocks])


def capture(
    monitor: Commands,
    folder: Path,
    hooks: Hooks,
    tracked: Tracked,
    *,
    number: int,
    earlier: Earlier | None,
    stop: threading.Event,
) -> TrackedCaptured:
    """Capture a running guest's memory and device state into a new directory.

    `number`: number of this capture; `earlier`: the previous snapshot, None: all memory is read.
    Raises CannotCapture, CaptureFailed, CannotTrack, HypervisorError, OSError or Cancelled; the
    guest is then in its previous state, and the directory is removed.
    """
    _require_migratable(monitor)
    device_state.clean(monitor)
    undo = replace(
        migration_settings.settings_facts(monitor, want=None, runs=True, folder=folder),
        capabilities={},
    )
    hooks.note(undo)
    head = device_state.head_of(monitor, [(one.name, one.range.size) for one in tracked.blocks])
    writer = ImageWriter(folder)
    try:
        writer.begin(head)
        with (
            undo_process_for(monitor, undo, None, hooks.held) as keeper,
            StateFile(monitor, head) as file,
        ):
            run = _Run(monitor, hooks, tracked, writer, earlier=earlier, stop=stop)
            try:
                run.rounds()
                hooks.ready()
                run.last_pause(file)
            except BaseException:
                hooks.given_up()
                with suppress(HypervisorError, CaptureFailed):
                    migration_settings.break_off(monitor, undo)
                    keeper.all_well()
                raise
            keeper.all_well()
            state = file.state()
        warning = _keep(tracked, number)
        run.write_late()
        writer.tail(memoryview(state)[parse_head(state)[1] :])
        return run.result(warning)
    except BaseException:
        writer.remove()
        raise


def _keep(tracked: Tracked, number: int) -> str | None:
    """Keep tracking writes, now since capture `number`. Returns a warning if that fails."""
    try:
        tracked.keep(number)
    except (OSError, VmckptError, subprocess.CalledProcessError) as exc:
        return f"the next snapshot will read all memory: {exc}"
    return None


def _require_migratable(monitor: Commands) -> None:
    reasons = monitor.ask("query-migrate").get("blocked-reasons", [])
    if reasons:
        raise CannotCapture(
            f"{monitor.name} on {monitor.host}: QEMU cannot save its devices: {reasons[0]}",
            hint="remove that device, then take the snapshot",
        )


@dataclass(slots=True)
class _Block:
    """The pages of one block of memory, by what remains to be done."""

    name: str
    changed: Flags
    """Pages that may differ from the previous snapshot."""
    stale: Flags
    """Pages to copy: they were written, or the image does not have them yet."""
    copied: Flags
    """Pages that have been copied."""


class _Run:
    """One capture, after its undo record was stored."""

    def __init__(
        self, monitor: Commands, hooks: Hooks, tracked: Tracked, writer: ImageWriter, *,
        earlier: Earlier | None, stop: threading.Event,
    ) -> None:  # fmt: skip
        self._monitor, self._hooks, self._writer, self._stop = monitor, hooks, writer, stop
        self._tracked, self._writes = tracked, tracked.writes
        self._earlier = earlier
        self._memory = ProcessMemory(tracked.process, [one.range for one in tracked.blocks])
        self._blocks = [_block(one) for one in tracked.blocks]
        self._arena = np.empty((_PIECE, PAGE // 8), dtype=np.uint64)
        self._late: list[tuple[int, NDArray[np.intp], Pages]] = []
        self._read, self._reading = 0, 0.0
        self._paused = 0.0
        self._marks: list[tuple[str, float]] = []

    def rounds(self) -> None:
        """Copy written pages while the guest runs, until few remain.

        Raises CannotCapture if the guest writes too fast, CaptureFailed if it is not running,
        CannotTrack, HypervisorError, OSError, Cancelled.
        """
        if self._earlier is None:
            for block in self._blocks:
                block.changed[:] = block.stale[:] = True
            self._pause(self._collect)
        self._find_missing()
        done, before = 0, 0
        while True:
            progress = Progress(done, self._remaining(), before, self._rate)
            step = copy_rounds.decide(progress)
            if step is Step.FINISH:
                return
            if step is Step.GIVE_UP:
                raise CannotCapture(
                    f"{self._monitor.name} on {self._monitor.host} writes its memory too fast:"
                    f" copying {show_bytes(progress.remaining * PAGE)} would pause it for"
                    f" {show_seconds(copy_rounds.pause(progress))}; the limits are"
                    f" {show_seconds(copy_rounds.LONGEST)} and"
                    f" {show_bytes(copy_rounds.MOST_PAGES * PAGE)}",
                    hint="use another capture method: --way background",
                )
            if done or self._earlier is not None:
                self._pause(self._collect)
            self._copy()
            done, before = done + 1, progress.remaining

    def last_pause(self, file: StateFile) -> None:
        """Pause the guest, capture the rest, and resume it.

        Raises Resumed, CannotCapture, CaptureFailed, HypervisorError, CannotTrack, OSError.
        """
        monitor, hooks = self._monitor, self._hooks
        self._must_run()
        self._mark("begin")
        monitor.tell("stop", {})
        self._mark("stop")
        # QEMU no longer writes memory: its devices are drained, and their state is only read.
        searching = thread_call.start(self._collect_late, name="copying")
        try:
            file.save()
            self._mark("device state")
            if hooks.barrier is not None:
                hooks.barrier()
                self._mark("barrier")
        finally:
            searching.exception()
        searching.result()
        self._collect_late()
        self._mark("changed pages")
        if (now := monitor.run_state()) != "paused":
            raise Resumed(
                f"{monitor.name} on {monitor.host} did not stay paused during its capture: its"
                f" run state is {now}"
            )
        monitor.tell("cont", {})
        self._mark("cont")
        # After the pause, which this does not prolong: memory that came before it is seen as well.
        if memory_files.names(monitor) != self._tracked.backends:
            raise memory_files.replugged(monitor)
        hooks.captured()

    def write_late(self) -> None:
        """Write the pages that were copied in the last pause."""
        for index, some, pages in self._late:
            self._write(index, some, pages)
        self._late.clear()

    def result(self, warning: str | None) -> TrackedCaptured:
        """Complete the image, and return it with the warning.

        Raises CaptureFailed, StreamDamaged.
        """
        unread = [~(one.changed | one.copied) for one in self._blocks]
        image = self._writer.finish(unread)
        phases = {b[0]: Seconds(b[1] - a[1]) for a, b in pairwise(self._marks)}
        if self._paused:
            phases = {"pauses before": Seconds(self._paused), **phases}
        part = self._earlier is not None
        return TrackedCaptured(
            image=image, pause=Seconds(sum(phases.values())), phases=phases,
            changed={one.name: one.changed for one in self._blocks} if part else None,
            copied={one.name: one.copied for one in self._blocks} if part else None,
            warning=warning,
        )  # fmt: skip

    def _mark(self, step: str) -> None:
        self._marks.append((step, time.monotonic()))

    def _must_run(self) -> None:
        """Check that the guest is running, since a pause by another tool must not be ended.

        Raises CaptureFailed.
        """
        monitor = self._monitor
        if (now := monitor.run_state()) != "running":
            raise CaptureFailed(
                f"{monitor.name} on {monitor.host} is no longer running: its run state is {now}",
                hint="take the snapshot again",
            )

    def _pause(self, work: Callable[[], object]) -> None:
        self._must_run()
        began = time.monotonic()
        self._monitor.tell("stop", {})
        work()
        self._monitor.tell("cont", {})
        self._paused += time.monotonic() - began

    def _collect(self) -> list[Runs]:
        """Record and protect the pages that the paused guest has written.

        Returns these pages for each block.
        """
        found = self._writes.collect_all()
        for block, runs in zip(self._blocks, found, strict=True):
            written = page_runs.numbers(runs)
            block.changed[written] = True
            block.stale[written] = True
        return found

    def _collect_late(self) -> None:
        """Copy the written pages of the paused guest to memory."""
        self._collect()
        for index, block in enumerate(self._blocks):
            for some in _pieces(np.flatnonzero(block.stale)):
                self._late.append((index, some, self._read_pages(index, some)))
            block.copied |= block.stale
            block.stale[:] = False

    def _find_missing(self) -> None:
        """Mark the pages for which QEMU has no memory as changed, and not to be copied.

        Such pages were never written, or were discarded by a balloon, and read as zeros.
        """
        maps = Path(f"/proc/{self._tracked.process.pid}/maps").read_text()
        for index, block in enumerate(self._blocks):
            range_ = self._tracked.blocks[index].range
            file = memory_files.shared_file(maps, self._tracked.process, range_)
            missing = ~self._memory.populated(index, file)
            block.changed |= missing
            block.stale &= ~missing

    def _remaining(self) -> int:
        """Return how many pages must be copied: those recorded, and those written since."""
        total = 0
        for block, runs in zip(self._blocks, self._writes.scan(), strict=True):
            total += int(np.count_nonzero(block.stale))
            total += page_runs.count(runs)
        return total

    def _copy(self) -> None:
        """Copy the recorded pages, and the rest of their chunks, while the guest runs.

        Raises Cancelled, OSError.
        """
        for index, block in enumerate(self._blocks):
            wanted = block.stale
            if self._earlier is not None:
                around = self._earlier.around(block.name, block.changed) & ~block.changed
                wanted = wanted | (around & ~block.copied)
            for some in _pieces(np.flatnonzero(wanted)):
                if self._stop.is_set():
                    raise Cancelled(f"the capture of {self._monitor.name} was cancelled")
                self._write(index, some, self._read_pages(index, some, self._arena))
                self._hooks.progress(self._writer.done, self._writer.total)
            block.copied |= wanted
            block.stale[:] = False

    @property
    def _rate(self) -> float:
        return self._read / self._reading if self._reading else float(copy_rounds.ASSUMED)

    def _read_pages(self, index: int, some: NDArray[np.intp], into: Pages | None = None) -> Pages:
        began = time.monotonic()
        pages = self._memory.read(index, page_runs.of_numbers(some), into)
        self._reading += time.monotonic() - began
        self._read += len(some)
        return pages

    def _write(self, index: int, some: NDArray[np.intp], pages: Pages) -> None:
        full = pages.any(axis=1)
        addresses = some.astype(np.uint64) * np.uint64(PAGE)
        if full.any():
            self._writer.pages(index, addresses[full], pages[full].view(np.uint8))
        self._writer.zeros(index, addresses[~full])


def _block(one: RamBlock) -> _Block:
    size = one.range.size // PAGE
    return _Block(one.name, *(np.zeros(size, dtype=np.bool_) for _ in range(3)))


def _pieces(some: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    return (some[at : at + _PIECE] for at in range(0, len(some), _PIECE))
