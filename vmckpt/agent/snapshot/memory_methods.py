"""All methods of capturing a guest's memory, behind one function."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vmckpt.agent.snapshot import choose_method, spool
from vmckpt.agent.snapshot.choose_method import CaptureFacts, Choice, MemoryMethod
from vmckpt.agent.snapshot.memory_parent import MemoryParent, around
from vmckpt.capture import free_space
from vmckpt.capture.disks import bitmaps
from vmckpt.capture.memory import (
    background_snapshot,
    libvirt_save,
    memory_files,
    outside_writers,
    tracked_capture,
    tracker,
)
from vmckpt.capture.memory.background_snapshot import Captured, Hooks
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.shared_memory import SharedMemory
from vmckpt.capture.memory.tracked_capture import Earlier, Tracked
from vmckpt.capture.memory.write_tracking import CannotTrack
from vmckpt.errors import CannotCapture
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
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
    """Number of this capture, for the next capture; None: the next capture reads all memory."""
    since: int | None = None
    """Number of the previous capture, to which `changed` refers; None: unknown."""
    changed: Mapping[str, Flags] | None = None
    """For each block, the pages that may differ from the capture `since`; None: any page may."""
    copied: Mapping[str, Flags] | None = None
    """For each block, the pages that the image contains; None: all pages."""

    def release(self) -> None:
        """Remove the image, once it is stored or abandoned. Raises OSError.

        Keeps an image of method `shared`, with which the next capture compares the memory.
        """
        if self.way is not MemoryMethod.SHARED:
            self.image.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """How to capture memory, and where to put it."""

    way: MemoryMethod
    folder: Path
    """Directory for an image that is removed once it is stored."""
    number: int
    """Unique number of this capture."""
    parent: MemoryParent
    """The memory of the previous snapshot in the same store."""


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
    CannotTrack, CaptureFailed, HypervisorError, GuestLocked, RemoteError, OSError or Cancelled.
    """
    with ExitStack() as tracking:
        facts, tracked = _look(monitor, wanted.way, tracking)
        work = _Capture(monitor, wanted, hooks, stop, stack=stack, tracked=tracked)
        choice = choose_method.choose(wanted.way, facts)
        if choice.against is not None:
            raise CannotCapture(
                f"{monitor.name} on {monitor.host}: {choice.against}; nothing was captured",
                hint="omit --way, so that vmckpt chooses a capture method that works",
            )
        if wanted.way is MemoryMethod.BACKGROUND or choice.way is MemoryMethod.TRACKING:
            memory_files.drop(monitor.guest)
        warnings: list[str] = []
        while True:
            if choice.way is not MemoryMethod.TRACKING:
                tracking.close()
            try:
                return work.done(choice, tuple(warnings))
            except (CannotCapture, CannotTrack) as exc:
                after = choose_method.otherwise(wanted.way, choice.way)
                if after is None:
                    raise
                warnings.append(f"method {choice.way} failed: {exc.message}")
                choice = Choice(way=after, why=f"method {choice.way} failed")


def _look(
    monitor: QmpMonitor, way: MemoryMethod, stack: ExitStack
) -> tuple[CaptureFacts, Tracked | None]:
    """Return the facts, and the guest's write tracking, entered on `stack`; None: not tracked.

    Raises HypervisorError, GuestLocked.
    """
    runs = monitor.run_state() == "running"
    if way in (MemoryMethod.BACKGROUND, MemoryMethod.LIBVIRT):
        return CaptureFacts(runs=runs, untracked="", private=None), None
    process = identity.hold(monitor.guest)
    if process is None:
        why = "the guest has no QEMU process on this host"
        return CaptureFacts(runs=runs, untracked=why, private=why), None
    stack.enter_context(process)
    tracked: Tracked | None = None
    untracked: str | None = "another method was requested"
    if runs and way is not MemoryMethod.SHARED:
        tracked, untracked = _tracked(monitor, process, stack)
    try:
        files = memory_files.files(monitor, process)
    except CannotCapture as exc:
        private = exc.message.partition(": ")[2] or exc.message
        return CaptureFacts(runs=runs, untracked=untracked, private=private), tracked
    return CaptureFacts(
        runs=runs,
        untracked=untracked,
        private=None,
        kept=(memory_files.place(monitor.guest, process.pid) / "last.json").exists(),
        memory=Bytes(sum(file.size for file in files)),
        room=memory_files.room(),
    ), tracked


def _tracked(
    monitor: QmpMonitor, process: HeldProcess, stack: ExitStack
) -> tuple[Tracked | None, str | None]:
    """Return the guest's write tracking, or why its writes cannot be tracked."""
    if (why := outside_writers.found(monitor.xml())) is not None:
        return None, why
    try:
        return stack.enter_context(Tracked(monitor, process)), None
    except CannotTrack as exc:
        return None, exc.message


class _Capture:
    """One capture, by whichever method works."""

    def __init__(
        self, monitor: QmpMonitor, wanted: CaptureRequest, hooks: Hooks, stop: threading.Event, *,
        stack: ExitStack, tracked: Tracked | None,
    ) -> None:  # fmt: skip
        self._monitor, self._wanted, self._hooks = monitor, wanted, hooks
        self._stop, self._stack, self._tracked = stop, stack, tracked

    def done(self, choice: Choice, warnings: tuple[str, ...]) -> Memory:
        """Capture with the chosen method. Raises the same errors as `capture`."""
        if choice.way is MemoryMethod.TRACKING:
            assert self._tracked is not None
            return self._by_tracking(self._tracked, warnings)
        if choice.way is MemoryMethod.BACKGROUND:  # QEMU needs a userfaultfd of its own
            tracker.end(self._monitor.guest)
        else:  # a background snapshot keeps images open
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

    def _by_tracking(self, tracked: Tracked, warnings: tuple[str, ...]) -> Memory:
        monitor, wanted, parent = self._monitor, self._wanted, self._wanted.parent
        why = _why_all(tracked, parent)
        earlier = None
        if why is None and parent.number is not None:
            maps = parent.maps
            earlier = Earlier(
                number=parent.number, around=lambda name, flags: around(flags, maps.get(name))
            )
        else:
            free_space.require_space(wanted.folder.parent, free_space.memory(monitor))
        found = tracked_capture.capture(
            monitor, wanted.folder, self._hooks, tracked, number=wanted.number, earlier=earlier,
            stop=self._stop,
        )  # fmt: skip
        return Memory(
            image=found.image, pause=found.pause, way=MemoryMethod.TRACKING,
            why="reads what was written since the last snapshot" if why is None else
            f"reads all memory: {why}",
            warnings=warnings if found.warning is None else (*warnings, found.warning),
            phases=found.phases, copy=wanted.number, since=parent.number, changed=found.changed,
            copied=found.copied,
        )  # fmt: skip

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


def _why_all(tracked: Tracked, parent: MemoryParent) -> str | None:
    """Return why all memory must be read; None if unchanged pages are known."""
    if parent.number is None:
        return parent.why
    if tracked.number is None:
        return tracked.why
    if tracked.number != parent.number:
        return "the guest's last snapshot is in another store, or was not completed"
    return None
