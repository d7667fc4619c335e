"""Capture of a guest whose memory is in files: stop, device state, changed pages, go on.

QEMU leaves shared memory out of its stream; meanwhile what changed in it is found by comparing with
the last copy. The capability for that is on only while the guest stands still: left on, it would
make the next `virsh save` lose the memory.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vmckpt.checkpoint import guestmemory, settings
from vmckpt.checkpoint.activation import Activation
from vmckpt.checkpoint.background import Hooks, keeper_for
from vmckpt.checkpoint.compare import Flags, Mapping, bring_up
from vmckpt.checkpoint.draining import Drain, Tape
from vmckpt.checkpoint.image import FrozenImage
from vmckpt.checkpoint.lastcopy import LastCopy, PrivateMemory
from vmckpt.checkpoint.settings import IGNORE_SHARED, Commands
from vmckpt.checkpoint.standstill import Mark, Standstill
from vmckpt.checkpoint.stream import StreamParser
from vmckpt.errors import Cancelled, CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.units import Seconds

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
            self._files = guestmemory.files(monitor, qemu)
            started = guestmemory.started(qemu.pid)
            self._last = LastCopy(folder, self._files, f"{monitor.guest} {qemu.pid} {started}")
            try:
                for file in self._files:
                    self._live.append(self._map(file))
            except BaseException:
                self.close()
                raise

    def _map(self, file: guestmemory.MemoryFile) -> Mapping:
        try:
            opened = file.open(os.O_RDONLY)
        except OSError as exc:
            raise CannotCapture(
                f"{self._monitor.name} on {self._monitor.host}: its memory {file.names[0]!r}"
                f" cannot be opened: {exc}",
                mend="run as root on that host",
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
                mend="use the background snapshot",
            )
        undo = settings.look(monitor, want=IGNORE_SHARED, runs=True, folder=None)
        hooks.note(undo)
        known = self._last.epoch is not None
        self._last.tear()
        tape = Tape()
        with Drain(tape) as drain, keeper_for(monitor, undo, None, hooks.held) as keeper:
            try:
                changed = self._warm()
                if stop is not None and stop.is_set():
                    raise Cancelled(f"capture of {monitor.name} stopped")
                settings.set_bandwidth(monitor, settings.NO_LIMIT)
                drain.hand_over(monitor)
                standstill = Standstill(monitor, undo, drain)
                found = standstill.take(self._begin_comparing, _barrier(monitor, hooks))
                hooks.captured()
            except BaseException:
                drain.discard()
                with suppress(HypervisorError, CaptureFailed):
                    settings.break_off(monitor, undo)
                    keeper.all_well()
                raise
            settings.set_bandwidth(monitor, undo.bandwidth)
            keeper.all_well()
        sink = PrivateMemory(self._files)
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
