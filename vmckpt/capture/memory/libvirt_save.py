"""libvirt's own memory snapshot, for a guest that no other method can capture.

libvirt migrates the memory of the running guest to a file, and pauses the guest for the last pass.
The file is converted to a frozen image and then removed; until then, both take up space.
"""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

from vmckpt.capture import migration_settings
from vmckpt.capture.disks.bitmaps import Activation
from vmckpt.capture.memory import image
from vmckpt.capture.memory.background_snapshot import Captured, Hooks, undo_process_for
from vmckpt.capture.memory.image import FrozenImage, ImageWriter
from vmckpt.capture.migration_settings import Commands
from vmckpt.capture.qemu_stream import save_image
from vmckpt.capture.qemu_stream.stream import StreamParser
from vmckpt.errors import Cancelled, CannotCapture, CaptureFailed, HypervisorError
from vmckpt.units import Seconds

_READ = 1 << 20
_TURN = 0.05


class Saver(Commands, Protocol):
    """The part of `hypervisor.qmp.QmpMonitor` that is used here."""

    def xml(self) -> str: ...
    def save_memory_live(self, xml: str) -> None: ...
    def abort_job(self) -> None: ...


def capture(
    monitor: Saver,
    folder: Path,
    hooks: Hooks,
    *,
    stop: threading.Event | None = None,
) -> Captured:
    """Capture a running guest's memory and device state into a new directory.

    With a barrier, the guest is paused throughout. Raises CannotCapture, CaptureFailed,
    HypervisorError, OSError or Cancelled; the guest is then in its previous state, and the
    directory is removed.
    """
    began = time.monotonic()
    if monitor.run_state() != "running":
        raise CannotCapture(
            f"{monitor.name} on {monitor.host} is not running; after libvirt's snapshot, QEMU"
            " would refuse to save or migrate the guest",
            hint="use another capture method: --way background",
        )
    undo = migration_settings.settings_facts(monitor, want=None, runs=True, folder=folder)
    hooks.note(undo)
    folder.mkdir(mode=0o700)
    try:
        with undo_process_for(monitor, undo, None, hooks.held) as keeper:
            try:
                hooks.ready()
                stopped_at = time.monotonic()
                pause = _save(monitor, folder / "saved", hooks, stop or threading.Event())
            except BaseException:
                with suppress(HypervisorError, CaptureFailed):
                    migration_settings.break_off(monitor, undo)
                    keeper.all_well()
                raise
            migration_settings.restore(monitor, undo)
            keeper.all_well()
            if hooks.barrier is not None:
                pause = Seconds(time.monotonic() - stopped_at)
        hooks.captured()
        made = take_apart(folder / "saved", folder, hooks)
    except BaseException:
        image.remove(folder)
        raise
    return Captured(image=made, pause=pause, took=Seconds(time.monotonic() - began))


def _save(monitor: Saver, path: Path, hooks: Hooks, stop: threading.Event) -> Seconds:
    """Have libvirt write the save image. Returns how long libvirt paused the guest."""
    activation = Activation.of(monitor)
    if hooks.barrier is not None:
        monitor.tell("stop", {})
    _call(monitor, path, hooks, stop)
    status = monitor.ask("query-migrate")
    if hooks.barrier is not None:
        # libvirt refuses a memory snapshot during a backup, so the barrier comes last.
        activation.carry_out(monitor)
        hooks.barrier()
    return Seconds(float(status.get("downtime", 0)) / 1000)


def _call(monitor: Saver, path: Path, hooks: Hooks, stop: threading.Event) -> None:
    """Call libvirt in a thread, since the call blocks until the snapshot is complete.

    Raises HypervisorError, and Cancelled if `stop` is set.
    """
    wanted = request(path, disks(monitor.xml()))
    errors: list[Exception] = []

    def run() -> None:
        try:
            monitor.save_memory_live(wanted)
        except Exception as exc:  # noqa: BLE001 - raised in the waiting thread
            errors.append(exc)

    thread = threading.Thread(target=run, name="libvirt's snapshot", daemon=True)
    thread.start()
    asked = False
    while thread.is_alive():
        thread.join(_TURN)
        if stop.is_set() and not asked:
            monitor.abort_job()
            asked = True
        ram = monitor.ask("query-migrate").get("ram", {})
        total = int(ram.get("total", 0))
        hooks.progress(total - int(ram.get("remaining", 0)), total)
    if stop.is_set() and errors:
        raise Cancelled(f"the capture of {monitor.name} was cancelled") from errors[0]
    if errors:
        raise errors[0]


def request(path: Path, targets: list[str]) -> str:
    """Return libvirt's XML for a snapshot of memory to a file, without disks.

    `path`: the file; `targets`: names of all of the guest's disks.
    """
    kept = "".join(f"<disk name={quoteattr(name)} snapshot='no'/>" for name in targets)
    return (
        f"<domainsnapshot><memory snapshot='external' file={quoteattr(str(path))}/>"
        f"<disks>{kept}</disks></domainsnapshot>"
    )


def disks(xml: str) -> list[str]:
    """Return the target names of a guest's disks."""
    targets = ElementTree.fromstring(xml).findall("./devices/disk/target")
    return [target.get("dev", "") for target in targets]


def take_apart(saved: Path, folder: Path, hooks: Hooks) -> FrozenImage:
    """Convert a libvirt save image to a frozen image in `folder`, and delete the save image.

    Returns the frozen image. Raises StreamDamaged, CaptureFailed, OSError.
    """
    writer = ImageWriter(folder, made=True)
    try:
        parser = StreamParser(writer)
        with saved.open("rb", buffering=0) as file:
            save_image.read_header(file)
            while data := file.read(_READ):
                parser.feed(data)
                hooks.progress(writer.done, writer.total)
        parser.finish()
        saved.unlink()
        return writer.finish()
    except BaseException:
        writer.remove()
        raise
