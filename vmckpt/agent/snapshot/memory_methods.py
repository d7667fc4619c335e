"""The ways in which a guest's memory is captured, behind one call."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vmckpt.agent.snapshot import choose_method, spool
from vmckpt.agent.snapshot.choose_method import CaptureFacts, Choice, MemoryMethod
from vmckpt.capture import free_space
from vmckpt.capture.disks import bitmaps
from vmckpt.capture.memory import background_snapshot, libvirt_save, memory_files
from vmckpt.capture.memory.background_snapshot import Captured, Hooks
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.shared_memory import SharedMemory
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.units import Bytes, Seconds

_SHORT = Seconds(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory and device state of one instant, to be stored before the block is left."""

    image: FrozenImage
    pause: Seconds
    """How long the guest stood still."""
    way: MemoryMethod
    why: str
    warnings: tuple[str, ...] = ()
    phases: Mapping[str, Seconds] | None = None
    """What the pause was made of, where that is known."""
    copy: int | None = None
    """The number of the last copy, which this image is; None: it is none."""
    since: int | None = None
    """The number of the copy before; what `changed` is told against."""
    changed: Mapping[str, Flags] | None = None
    """For each block the pages that are not as they were then; None: any may be."""

    def release(self) -> None:
        """It is stored, or will not be: its image goes, unless it is the guest's last copy."""
        if self.copy is None:
            self.image.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """What is to be captured, and where to."""

    way: MemoryMethod
    folder: Path
    """For an image that is not kept."""
    number: int
    """Of the last copy that this capture makes, if it makes one; no other ever had it."""


def capture(
    monitor: QmpMonitor,
    wanted: CaptureRequest,
    hooks: Hooks,
    stop: threading.Event,
    stack: ExitStack,
) -> Memory:
    """Capture a guest, which goes on as it did before; what must be held is put on `stack`.

    Hooks may be called once more if the first way turns out not to work. Raises CannotCapture,
    CaptureFailed, HypervisorError, GuestLocked or Cancelled.
    """
    work = _Capture(monitor, wanted, hooks, stop, stack)
    choice = choose_method.choose(wanted.way, _look(monitor, wanted.way))
    if choice.against is not None:
        raise CannotCapture(
            f"{monitor.name} on {monitor.host}: {choice.against}; nothing was captured",
            hint="see vmckpt prepare, or leave --way out",
        )
    if wanted.way is MemoryMethod.BACKGROUND:
        memory_files.drop(monitor.guest)
    warnings: list[str] = []
    while True:
        try:
            return work.done(choice, tuple(warnings))
        except CannotCapture as exc:
            after = choose_method.otherwise(wanted.way, choice.way)
            if after is None:
                raise
            warnings.append(f"not captured by way of {choice.way}: {exc.message}")
            choice = Choice(way=after, why=f"{choice.way} does not work with it")


def _look(monitor: QmpMonitor, way: MemoryMethod) -> CaptureFacts:
    runs = monitor.run_state() == "running"
    if way in (MemoryMethod.BACKGROUND, MemoryMethod.LIBVIRT):
        return CaptureFacts(runs=runs, private=None)
    process = identity.hold(monitor.guest)
    if process is None:
        return CaptureFacts(runs=runs, private="its QEMU is not on this host")
    with process:
        try:
            files = memory_files.files(monitor, process)
        except CannotCapture as exc:
            return CaptureFacts(runs=runs, private=exc.message.partition(": ")[2] or exc.message)
    return CaptureFacts(
        runs=runs,
        private=None,
        kept=(memory_files.place(monitor.guest, process.pid) / "last.json").exists(),
        memory=Bytes(sum(file.size for file in files)),
        room=memory_files.room(),
    )


class _Capture:
    """One capture, by one way or another."""

    def __init__(
        self, monitor: QmpMonitor, wanted: CaptureRequest, hooks: Hooks, stop: threading.Event,
        stack: ExitStack,
    ) -> None:  # fmt: skip
        self._monitor, self._wanted, self._hooks = monitor, wanted, hooks
        self._stop, self._stack = stop, stack

    def done(self, choice: Choice, warnings: tuple[str, ...]) -> Memory:
        """By that way. Raises as `capture`."""
        if choice.way is not MemoryMethod.BACKGROUND:  # QEMU's own snapshots let go of no image
            bitmaps.require_reopen(self._monitor)
        if choice.way is MemoryMethod.SHARED:
            return self._shared(choice, warnings)
        # libvirt's file is there until it has been taken apart.
        ways: Mapping[MemoryMethod, tuple[Callable[..., Captured], int]] = {
            MemoryMethod.BACKGROUND: (background_snapshot.capture, 1),
            MemoryMethod.LIBVIRT: (libvirt_save.capture, 2),
        }
        take, times = ways[choice.way]
        folder = self._wanted.folder
        free_space.require_space(folder.parent, Bytes(times * free_space.memory(self._monitor)))
        found = take(self._monitor, folder, self._hooks, stop=self._stop)
        return Memory(
            image=found.image, pause=found.pause, way=choice.way, why=choice.why, warnings=warnings
        )

    def _shared(self, choice: Choice, warnings: tuple[str, ...]) -> Memory:
        monitor = self._monitor
        with identity.require(monitor.guest, monitor.name, monitor.host) as process:
            folder = memory_files.place(monitor.guest, process.pid)
            self._stack.enter_context(spool.held(folder, patience=_SHORT))
            memory_files.watch(folder, process.pid)
        memory = self._stack.enter_context(SharedMemory(monitor, folder))
        since = memory.epoch
        found = memory.capture(self._wanted.number, self._hooks, stop=self._stop)
        return Memory(
            image=found.image, pause=found.pause, way=choice.way, why=choice.why,
            warnings=warnings, phases=found.phases, copy=found.epoch, since=since,
            changed=found.changed,
        )  # fmt: skip
