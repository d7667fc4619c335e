"""Capture an epoch of a running guest: its memory, device state, disk writes and network output.

All of these are captured at one instant: the guest is paused from the first step to the last.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from vmckpt.capture import migration_settings
from vmckpt.capture.memory.pipe_reader import Drain, Tape
from vmckpt.capture.memory.shared_memory import Comparison, Mark, PausedCapture, Resumed
from vmckpt.capture.migration_settings import Commands, Undo
from vmckpt.capture.qemu_stream.device_state import StateFile
from vmckpt.capture.qemu_stream.header import Head
from vmckpt.errors import CaptureFailed, HypervisorError
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.units import Seconds


class Finder(Protocol):
    """A method to find changed pages, for example a `memory.ProtectedMemory`."""

    def prepare(self) -> None: ...
    def begin(self) -> Comparison[list[Changed]]: ...


class Output(Protocol):
    """The guest's buffered output, for example `network_buffer.Buffers`."""

    def close_epoch(self) -> int: ...


class Log(Protocol):
    """The write log of one disk, for example `disks.epoch_log.WriteLog`."""

    def size(self) -> int: ...
    def set_open(self, on: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A captured epoch."""

    changed: Sequence[Changed]
    """The changes in each block of memory."""
    state: bytes
    """Device state, as QEMU wrote it."""
    ends: tuple[int, ...]
    """The epoch's end offset in each disk's log."""
    packets: int
    """Number of buffered packets at the network card that has the most."""
    pause: Seconds
    """How long the guest was paused."""
    phases: dict[str, Seconds]
    """How long each step of the pause took, by step name."""


class Capturer:
    """Captures one epoch after another, and reads the device state through a QEMU migration.

    `still` is called with True right before the guest is paused, and with False once it is running
    again.
    """

    def __init__(
        self, monitor: Commands, undo: Undo, *, finder: Finder, output: Output,
        logs: Sequence[Log], still: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self._monitor, self._undo = monitor, undo
        self._finder, self._output, self._logs = finder, output, logs
        self._still = still

    def take(self, *, goes_on: bool = True) -> Epoch:
        """Capture an epoch. Without `goes_on`, the guest stays paused afterwards.

        Raises Resumed if another tool resumed the guest, HypervisorError, CaptureFailed, and any
        error of the finder or the output. In that case, QEMU's settings are restored and the guest
        is resumed.
        """
        monitor = self._monitor
        self._finder.prepare()
        tape = Tape()
        packets = 0
        ends: tuple[int, ...] = ()

        def barrier(mark: Mark) -> None:
            nonlocal packets, ends
            ends = tuple(log.size() for log in self._logs)
            packets = self._output.close_epoch()
            mark("output")

        with Drain(tape) as drain, self._pausing(goes_on=goes_on):
            standstill = PausedCapture(monitor, self._undo, drain)
            try:
                drain.hand_over(monitor)
                changed = standstill.take(self._finder.begin, barrier, goes_on=goes_on)
            except BaseException:
                drain.discard()  # a migration that is cancelled waits for the reader of its pipe
                raise
        marks = standstill.marks
        return Epoch(
            changed=changed, state=bytes(tape.data), ends=ends, packets=packets,
            pause=Seconds(marks[-1][1] - marks[0][1]),
            phases={b[0]: Seconds(b[1] - a[1]) for a, b in pairwise(marks)},
        )  # fmt: skip

    def pause(self, work: Callable[[], object]) -> None:
        """Call `work` while the guest is paused; a guest that is paused already stays paused.

        Raises HypervisorError, and any error of `work`; a guest that was running is then resumed.
        """
        if self._monitor.run_state() != "running":
            work()
            return
        with self._pausing(goes_on=True):
            self._monitor.tell("stop", {})
            work()
            self._monitor.tell("cont", {})

    @contextmanager
    def _pausing(self, *, goes_on: bool) -> Iterator[None]:
        """Prepare a pause in the block, and clean up after it.

        If the block fails, the guest is resumed. `goes_on`: the guest runs afterwards.
        """
        try:
            # The guest cannot be stopped until its disk writes in flight are complete.
            self._open_logs(True)
            self._still(True)
            yield
        except BaseException:
            with suppress(HypervisorError, CaptureFailed):
                migration_settings.break_off(self._monitor, self._undo)
                self._still(False)
            raise
        finally:
            self._open_logs(False)
        if goes_on:
            self._still(False)

    def _open_logs(self, on: bool) -> None:
        for log in self._logs:
            log.set_open(on)


class DeviceStateCapturer(Capturer):
    """A capturer that saves the device state without a migration; see `device_state`.

    This is several times faster, and changes no setting of QEMU. Memory that is not in the finder's
    blocks is not captured.
    """

    def __init__(
        self, monitor: Commands, undo: Undo, head: Head, *, finder: Finder, output: Output,
        logs: Sequence[Log], still: Callable[[bool], None],
    ) -> None:  # fmt: skip
        super().__init__(monitor, undo, finder=finder, output=output, logs=logs, still=still)
        self._head = head

    def take(self, *, goes_on: bool = True) -> Epoch:
        self._finder.prepare()
        with StateFile(self._monitor, self._head) as file, self._pausing(goes_on=goes_on):
            return self._paused(file, goes_on=goes_on)

    def _paused(self, file: StateFile, *, goes_on: bool) -> Epoch:
        monitor = self._monitor
        marks = [("begin", time.monotonic())]

        def mark(step: str) -> None:
            marks.append((step, time.monotonic()))

        monitor.tell("stop", {})
        mark("stop")
        # QEMU no longer writes memory: its devices are drained, and their state is only read.
        searching = self._finder.begin()
        try:
            # After the last epoch, the guest's images belong to the other host.
            file.save(releases_disks=not goes_on)
            mark("device state")
            ends = tuple(log.size() for log in self._logs)
            packets = self._output.close_epoch()
            mark("output")
            changed = searching.result()
            mark("changed pages")
            if (now := monitor.run_state()) != "paused":
                raise Resumed(
                    f"{monitor.name} on {monitor.host} was resumed during its capture: it is {now}"
                )
        except BaseException as exc:
            # The memory must not change before the search has ended.
            with suppress(Exception):
                found = searching.result()
                if isinstance(exc, Resumed):
                    exc.found = found
            raise
        if goes_on:
            monitor.tell("cont", {})
        mark("cont")
        return Epoch(
            changed=changed, state=file.state(), ends=ends, packets=packets,
            pause=Seconds(marks[-1][1] - marks[0][1]),
            phases={b[0]: Seconds(b[1] - a[1]) for a, b in pairwise(marks)},
        )  # fmt: skip
