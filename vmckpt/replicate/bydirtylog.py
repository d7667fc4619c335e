"""Epochs by QEMU's dirty log for as long as a protection lasts; by comparison where it is not on.

While it is on, QEMU is in COLO, and whoever comes after an agent that died must bring it out of
that first: what was so before is written down.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.checkpoint.settings import Commands
from vmckpt.errors import VmckptError
from vmckpt.replicate import dirtylog
from vmckpt.replicate.capture import Capturer, Epoch, Output
from vmckpt.replicate.dirtylog import Before, DirtyLog
from vmckpt.replicate.finder import Changed

_BEFORE, _FAILED = "colo.json", "dirty-log-failed"


class Gate:
    """The guest's output as its filters hold it, or nothing of it before they are there."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.held = False

    def close_epoch(self) -> int:
        return self._output.close_epoch() if self.held else 0


class ByDirtyLog:
    """As capture.Capturer. `make` makes one for each time that it is begun."""

    def __init__(
        self, monitor: Commands, folder: Path, make: Callable[[], DirtyLog], *,
        compare: Capturer, gate: Gate,
    ) -> None:  # fmt: skip
        self._monitor, self._folder, self._make = monitor, folder, make
        self._compare, self._gate = compare, gate
        self._log: DirtyLog | None = None

    def begin(self) -> Sequence[Changed]:
        """Begin, if it is not on; what differs from the last copies, for the next epoch.

        It takes as long as memory is large, and the guest runs. Raises as `take`.
        """
        if self._log is not None:
            return ()
        self._gate.held = False  # no epoch ends here
        with self._noted():
            before = dirtylog.look(self._monitor)
            self._write(before)
            log = self._make()
            epoch = log.begin(before)
        self._log = log
        return epoch.changed

    def take(self, *, goes_on: bool = True) -> Epoch:
        """Raises VmckptError: all is put back then, the guest runs, and the next agent compares."""
        if self._log is None:
            return self._compare.take(goes_on=goes_on)
        self._gate.held = True
        with self._noted():
            return self._log.take(goes_on=goes_on)

    def end(self) -> None:
        """The guest runs on without it. Raises HypervisorError, CaptureFailed."""
        log, self._log = self._log, None
        if log is not None:
            log.end()
        (self._folder / _BEFORE).unlink(missing_ok=True)

    def _write(self, before: Before) -> None:
        new = self._folder / f"{_BEFORE}.new"
        new.write_text(before.to_json())
        new.rename(self._folder / _BEFORE)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except VmckptError as exc:
            (self._folder / _FAILED).write_text(str(exc))
            raise


def leave(monitor: Commands, folder: Path) -> None:
    """Bring QEMU out of what an agent left it in; may be repeated.

    Raises HypervisorError, CaptureFailed.
    """
    file = folder / _BEFORE
    with suppress(FileNotFoundError, ValueError, TypeError):
        dirtylog.leave(monitor, Before.from_json(file.read_text()))
    file.unlink(missing_ok=True)


def failed(folder: Path) -> str | None:
    """Why it is not used any more in this protection; None: nothing is known against it."""
    with suppress(OSError):
        return (folder / _FAILED).read_text()
    return None
