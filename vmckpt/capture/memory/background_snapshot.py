"""The background snapshot: QEMU saves each page before the running guest changes it.

Before QEMU 9.0, a paused guest resumes by itself once its state is captured. A guest that is to
stay paused is therefore paused again immediately. An ordinary migration would keep the guest
paused, but QEMU would then refuse to save or migrate the guest until it has run again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.capture import migration_settings
from vmckpt.capture.memory.image import FrozenImage, ImageWriter
from vmckpt.capture.memory.pipe_reader import Drain
from vmckpt.capture.memory.undo_process import UndoProcess
from vmckpt.capture.migration_settings import BACKGROUND, PIPE, STOPPED, Commands, Note, Undo
from vmckpt.capture.qemu_stream.stream import StreamParser
from vmckpt.errors import Cancelled, CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.units import Seconds

Progress = Callable[[int, int], None]
"""Called with the bytes of memory captured so far, and the total."""

_TURN = 0.02
# Number of iterations between two queries of QEMU's migration status.
_TURNS_PER_LOOK = 10


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A successful capture."""

    image: FrozenImage
    pause: Seconds
    """How long the guest was paused for the capture; 0 if the guest was not running."""
    took: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that a capture calls as it proceeds, and files that it keeps open."""

    note: Note
    ready: Callable[[], None] = _nothing
    """Called when only the pause remains. In a group snapshot, it waits for the other guests."""
    barrier: Callable[[], None] | None = None
    """Captures disks and firmware; called while the guest is paused. None: the guest has none."""
    captured: Callable[[], None] = _nothing
    """Called once the guest's state is captured and, if the guest is to run, it has resumed. Its
    memory may still be being transferred."""
    progress: Progress = _nothing
    given_up: Callable[[], None] = _nothing
    """Called when the capture has failed, before the rest of QEMU's stream is read, which may take
    a long time. Must not raise."""
    held: tuple[int, ...] = ()
    """Files that stay open, also in the undo process, until everything is undone; for example, the
    snapshot's lock."""


def capture(
    monitor: Commands,
    folder: Path,
    hooks: Hooks,
    *,
    goes_on: bool | None = None,
    stop: threading.Event | None = None,
) -> Captured:
    """Capture a guest's memory and device state into a new directory.

    `goes_on`: whether the guest is to run afterwards; None: only if it is running now. Before QEMU
    9.0, a guest that is to stay paused runs for about a millisecond. Raises CannotCapture,
    CaptureFailed, HypervisorError, OSError or Cancelled; the guest is then in its previous state,
    and the directory is removed.
    """
    began = time.monotonic()
    running = monitor.run_state() == "running"
    goes_on = running if goes_on is None else goes_on
    undo = migration_settings.settings_facts(monitor, want=BACKGROUND, runs=goes_on, folder=folder)
    hooks.note(undo)
    writer = ImageWriter(folder)
    try:
        parser = StreamParser(writer)
        with (
            Drain(parser) as drain,
            undo_process_for(monitor, undo, drain.reading, hooks.held) as keeper,
        ):
            run = _Run(
                monitor, undo, hooks, writer=writer, drain=drain, stop=stop or threading.Event()
            )
            try:
                hooks.ready()
                pause = run.all(running=running)
            except BaseException:
                drain.discard()
                hooks.given_up()
                with suppress(HypervisorError, CaptureFailed):
                    migration_settings.give_up(monitor, undo)
                    keeper.all_well()
                raise
            migration_settings.restore(monitor, undo)
            keeper.all_well()
        parser.finish()
        image = writer.finish()
    except BaseException:
        writer.remove()
        raise
    return Captured(image=image, pause=pause, took=Seconds(time.monotonic() - began))


class _Nowhere:
    """Discards a stream."""

    flowing = False

    def feed(self, _: memoryview) -> None:
        self.flowing = True


def undo_capture(monitor: Commands, undo: Undo, held: Sequence[int] = ()) -> None:
    """Undo an interrupted capture, from any process.

    After a failed background snapshot, a complete one is taken and discarded, which removes the
    write protection from the guest's memory (see migration_settings.give_up). `held`: see Hooks.
    Raises HypervisorError, CaptureFailed, OSError.
    """
    migration_settings.break_off(monitor, undo)
    broken = monitor.ask("query-migrate").get("status") in ("failed", "cancelled")
    if BACKGROUND not in undo.capabilities or not broken or monitor.run_state() != "running":
        return
    again = migration_settings.settings_facts(monitor, want=BACKGROUND, runs=True, folder=None)
    with (
        Drain(_Nowhere()) as drain,
        undo_process_for(monitor, again, drain.reading, held) as keeper,
    ):
        try:
            migration_settings.apply(monitor, again)
            drain.hand_over(monitor)
            monitor.tell("migrate", {"uri": f"fd:{PIPE}"})
        finally:
            migration_settings.give_up(monitor, again)
            keeper.all_well()


def undo_process_for(
    monitor: Commands, undo: Undo, stream: int | None, held: Sequence[int] = ()
) -> UndoProcess:
    """Start the process that undoes a capture if this process fails to. `held`: see Hooks.

    Raises OSError.
    """
    return UndoProcess(
        uri=monitor.uri, host=monitor.host, undo=undo.to_json(), stream=stream, held=held
    )


class _Run:
    """One capture, after its undo record was stored."""

    def __init__(
        self,
        monitor: Commands,
        undo: Undo,
        hooks: Hooks,
        *,
        writer: ImageWriter,
        drain: Drain,
        stop: threading.Event,
    ) -> None:
        self._monitor = monitor
        self._undo = undo
        self._writer = writer
        self._hooks = hooks
        self._drain = drain
        self._stop = stop

    def all(self, *, running: bool) -> Seconds:
        """Capture the guest. Returns how long the guest was paused.

        `running`: whether the guest is running now. Raises CannotCapture, CaptureFailed,
        HypervisorError, Cancelled, and the errors of the hooks.
        """
        monitor, drain = self._monitor, self._drain
        try:
            migration_settings.apply(monitor, self._undo)
            drain.hand_over(monitor)
            stopped_at = time.monotonic()
            stands = not running
            if self._hooks.barrier is not None:
                if running:
                    monitor.tell("stop", {})
                    stands = True
                self._hooks.barrier()
            monitor.tell("migrate", {"uri": f"fd:{PIPE}"})
        except QmpRefused as exc:
            raise self._refused(exc) from exc
        self._wait(drain.flowing.wait if self._undo.runs else self._keep_still)
        went_on = self._go_on(stands=stands)
        self._hooks.captured()
        self._wait(drain.ended)
        status = self._status(settled=True)
        if status["status"] != "completed":
            raise self._failed(status)
        if stands and running:
            return Seconds(went_on - stopped_at)
        return Seconds(status.get("downtime", 0) / 1000 if running else 0.0)

    def _keep_still(self, _limit: float) -> bool:
        """Pause the guest again. Returns whether the guest can no longer resume by itself."""
        flowing = self._drain.flowing.is_set()
        self._monitor.tell("stop", {})
        return flowing

    def _go_on(self, *, stands: bool) -> float:
        """Resume a paused guest that is to run, unless QEMU has resumed it already.

        `stands`: the guest may be paused. Returns the current time, by time.monotonic().
        """
        if stands and self._undo.runs and self._monitor.run_state() in STOPPED:
            self._monitor.tell("cont", {})
        return time.monotonic()

    def _wait(self, done: Callable[[float], bool]) -> None:
        """Wait until `done` returns True.

        Raises Cancelled if `stop` is set, CaptureFailed if the migration fails, HypervisorError.
        """
        turn = 0
        while not done(_TURN):
            if self._stop.is_set():
                raise Cancelled(f"the capture of {self._monitor.name} was cancelled")
            self._hooks.progress(self._writer.done, self._writer.total)
            turn += 1
            if turn % _TURNS_PER_LOOK == 0 or self._drain.ended(0):
                status = self._status(settled=False)
                if status["status"] in ("failed", "cancelled"):
                    raise self._failed(status)
        self._hooks.progress(self._writer.done, self._writer.total)

    def _status(self, *, settled: bool) -> dict[str, Any]:
        """Query the migration's status. `settled`: wait up to 10 s for the migration to end."""
        give_up = time.monotonic() + 10.0
        while True:
            status: dict[str, Any] = self._monitor.ask("query-migrate")
            ended = status.get("status") not in migration_settings.ACTIVE
            if ended or not settled or time.monotonic() > give_up:
                return {"status": "none", **status}
            time.sleep(0.002)

    def _refused(self, exc: HypervisorError) -> Exception:
        """Return CannotCapture if QEMU reports that it cannot capture this guest; else `exc`."""
        words = exc.message.lower()
        reasons = {
            "not supported by host kernel": "the host's kernel does not let QEMU use userfaultfd",
            "not compatible with guest memory": "QEMU cannot track writes to this kind of memory",
            "blocked": None,
            "not migratable": None,
            "non-migratable": None,
        }
        for sign, reason in reasons.items():
            if sign in words:
                return CannotCapture(
                    f"{self._monitor.name} on {self._monitor.host}: "
                    f"a background snapshot is not possible: {reason or exc.message}",
                    hint="use another capture method: --way shared or --way libvirt",
                )
        return exc

    def _failed(self, status: dict[str, Any]) -> CaptureFailed:
        return migration_settings.capture_failed(
            self._monitor, migration_settings.why_failed(status)
        )
