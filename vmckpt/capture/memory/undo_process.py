"""The undo process of a capture, which undoes the capture if the capturing process is killed.

It runs in its own session and keeps the reading end of QEMU's stream open: a background snapshot
whose pipe breaks leaves the guest hanging until its memory is unprotected (see `unblock_writes`).
It also keeps the snapshot's lock, so that no other process undoes the capture at the same time.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from vmckpt.errors import CaptureFailed, HypervisorError, VmckptError
from vmckpt.units import Seconds

ALL_WELL = b"."
_MODULE = "vmckpt.capture.memory.undo_process"
LASTS = Seconds(60.0)
"""How long the process retries: longer than a restart of libvirtd takes."""
_TURN = Seconds(1.0)


def left_behind(error: BaseException | None) -> CaptureFailed:
    """Return the error for a capture that could not be undone. `error`: the original failure."""
    why = (
        error.message
        if isinstance(error, VmckptError)
        else str(error or "the capture was interrupted")
    )
    told = CaptureFailed(
        f"{why}; some changes made by the capture could not be undone",
        hint="run vmckpt recover",
    )
    told.undone = False
    return told


class UndoProcess:
    """The undo process, as seen from the capture. Use as `with UndoProcess(...) as keeper`.

    When the block is left, the process undoes everything, over its own libvirt connection, unless
    `all_well` was called.
    """

    def __init__(
        self, *, uri: str, host: str, undo: str, stream: int | None, held: Sequence[int] = (),
        module: str = _MODULE,
    ) -> None:  # fmt: skip
        """`undo`: the undo record, as JSON; `stream`: the reading end of QEMU's pipe, if there is
        one; `held`: files that the process keeps open, such as locks. Raises OSError."""
        self._well = False
        facts = json.dumps({"uri": uri, "host": host, "undo": undo, "stream": stream})
        ours, self._line = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, facts],
                stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(*held, *(() if stream is None else (stream,))), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(ours)

    @property
    def process(self) -> int:
        return self._process.pid

    def tell(self, word: bytes) -> None:
        """Send one byte to the process. Does nothing if the process has exited."""
        with suppress(OSError):
            os.write(self._line, word)

    def __enter__(self) -> Self:
        return self

    def all_well(self) -> None:
        """Report that everything is restored, so that the process exits."""
        self._well = True
        self.tell(ALL_WELL)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Wait for the process, which undoes everything unless `all_well` was called.

        Raises CaptureFailed if not everything could be undone.
        """
        os.close(self._line)
        if self._process.wait() != 0 and not self._well:
            raise left_behind(error) from error


def _drain(stream: int) -> None:
    """Read and discard the rest of QEMU's stream."""
    with suppress(OSError):
        while os.read(stream, 1 << 20):
            pass


def _undo(uri: str, host: str, undo: str) -> bool:
    """Undo the capture. Returns whether everything was undone."""
    # Imported only when needed, which is rare.
    from vmckpt.capture import migration_settings  # noqa: PLC0415
    from vmckpt.capture.memory import image  # noqa: PLC0415
    from vmckpt.hypervisor.qemu_process import identity  # noqa: PLC0415
    from vmckpt.hypervisor.qmp import QmpMonitor  # noqa: PLC0415

    facts = migration_settings.Undo.from_json(undo)
    give_up = time.monotonic() + LASTS
    while True:
        try:
            with QmpMonitor(facts.guest, host=host, uri=uri) as monitor:
                migration_settings.give_up(monitor, facts, at_once=True)
            break
        except (HypervisorError, CaptureFailed):
            # If QEMU has ended, there is nothing left to undo.
            with suppress(HypervisorError):
                if not identity.runs(facts.guest):
                    break
        if time.monotonic() > give_up:
            return False
        time.sleep(_TURN)
    if facts.folder:
        image.remove(Path(facts.folder))  # the incomplete image of the dead capture
    return True


def main() -> None:
    """Wait for the end of the capture, and undo it unless it reported that everything is restored.

    Exits with status 1 if the capture could not be undone.
    """
    facts = json.loads(sys.argv[1])
    select.select([0], [], [])
    if os.read(0, 1) == ALL_WELL:
        return
    if facts["stream"] is not None:
        threading.Thread(target=_drain, args=(facts["stream"],), daemon=True).start()
    sys.exit(0 if _undo(facts["uri"], facts["host"], facts["undo"]) else 1)


if __name__ == "__main__":
    main()
