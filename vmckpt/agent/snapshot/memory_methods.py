"""All methods of capturing a guest's memory, behind one function."""

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
    """Memory and device state at one instant, to be stored before the capture's stack is closed."""

    image: FrozenImage
    pause: Seconds
    """How long the guest was paused."""
    way: MemoryMethod
    why: str
    warnings: tuple[str, ...] = ()
    phases: Mapping[str, Seconds] | None = None
    """Duration of each phase of the pause, if known."""
    copy: int | None = None
    """Number of this image as the guest's last copy; None: the image is not a last copy."""
    since: int | None = None
    """Number of the previous copy, to which `changed` refers."""
    changed: Mapping[str, Flags] | None = None
    """For each block, the pages that differ from the previous copy; None: any page may."""

    def release(self) -> None:
        """Remove the image, once it is stored or abandoned, unless it is the guest's last copy."""
        if self.copy is None:
            self.image.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """How to capture memory, and where to put it."""

    way: MemoryMethod
    folder: Path
    """Directory for an image that is removed once it is stored."""
    number: int
    """Unique number for the last copy, if this capture makes one."""


def capture(
    monitor: QmpMonitor,
    wanted: CaptureRequest,
    hooks: Hooks,
    stop: threading.Event,
    stack: ExitStack,
) -> Memory:
    """Capture a guest's memory, and let the guest continue as before.

    Resources that must stay open until the memory is stored are entered on `stack`. If the first
    method does not work, the next method calls the hooks again. Raises CannotCapture,
    CaptureFailed, HypervisorError, GuestLocked or Cancelled.
    """
    work = _Capture(monitor, wanted, hooks, stop, stack)
    choice = choose_method.choose(wanted.way, _look(monitor, wanted.way))
    if choice.against is not None:
        raise CannotCapture(
            f"{monitor.name} on {monitor.host}: {choice.against}; nothing was captured",
            hint=f"run vmckpt prepare {monitor.name}, or omit --way",
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
            warnings.append(f"method {choice.way} failed: {exc.message}")
            choice = Choice(way=after, why=f"{choice.way} does not work for this guest")


def _look(monitor: QmpMonitor, way: MemoryMethod) -> CaptureFacts:
    runs = monitor.run_state() == "running"
    if way in (MemoryMethod.BACKGROUND, MemoryMethod.LIBVIRT):
        return CaptureFacts(runs=runs, private=None)
    process = identity.hold(monitor.guest)
    if process is None:
        return CaptureFacts(runs=runs, private="the guest has no QEMU process on this host")
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
    """One capture, by whichever method works."""

    def __init__(
        self, monitor: QmpMonitor, wanted: CaptureRequest, hooks: Hooks, stop: threading.Event,
        stack: ExitStack,
    ) -> None:  # fmt: skip
        self._monitor, self._wanted, self._hooks = monitor, wanted, hooks
        self._stop, self._stack = stop, stack

    def done(self, choice: Choice, warnings: tuple[str, ...]) -> Memory:
        """Capture with the chosen method. Raises the same errors as `capture`."""
        if choice.way is not MemoryMethod.BACKGROUND:  # a background snapshot keeps images open
            bitmaps.require_reopen(self._monitor)
        if choice.way is MemoryMethod.SHARED:
            return self._shared(choice, warnings)
        # libvirt's file takes up space as well, until it has been converted to an image.
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
