"""A process beside each capture, in a session of its own: if the capture is killed, it undoes it.

Until then it sleeps. It holds the stream's reading end too, so that QEMU's pipe does not break: a
background snapshot that breaks off leaves the guest hanging until it is freed (see `userfaultfd`).
And it holds the snapshot's lock, so that nobody else puts the same guest back meanwhile.
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
"""How long it tries: a libvirtd that is restarted is back by then."""
_TURN = Seconds(1.0)


def left_behind(error: BaseException | None) -> CaptureFailed:
    """What is raised where not all could be put back; `error`: what went wrong before."""
    why = error.message if isinstance(error, VmckptError) else str(error or "the capture ended")
    told = CaptureFailed(
        f"{why}; and what was set for the capture could not all be put back",
        hint="run vmckpt recover",
    )
    told.undone = False
    return told


class UndoProcess:
    """The sleeping process. Use as `with UndoProcess(...) as keeper`, and tell it when all is well;
    leaving the block without that has it undo everything, over a connection of its own."""

    def __init__(
        self, *, uri: str, host: str, undo: str, stream: int | None, held: Sequence[int] = (),
        module: str = _MODULE,
    ) -> None:  # fmt: skip
        """`undo`: the facts as JSON; `stream`: the pipe's reading end; `held`: files that it keeps
        open, as locks are. Raises OSError."""
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
        """Say one byte to it; fine if somebody killed it."""
        with suppress(OSError):
            os.write(self._line, word)

    def __enter__(self) -> Self:
        return self

    def all_well(self) -> None:
        """Everything is put back, so it has nothing to do."""
        self._well = True
        self.tell(ALL_WELL)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let it do its work, if it has not been told that all is well; that may last.

        Raises CaptureFailed if it could not.
        """
        os.close(self._line)
        if self._process.wait() != 0 and not self._well:
            raise left_behind(error) from error


def _drain(stream: int) -> None:
    """Take what still comes, to the end."""
    with suppress(OSError):
        while os.read(stream, 1 << 20):
            pass


def _undo(uri: str, host: str, undo: str) -> bool:
    """Whether all is put back."""
    # Only now: a keeper that is not needed costs little.
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
            # A QEMU that has ended took all of it along.
            with suppress(HypervisorError):
                if not identity.runs(facts.guest):
                    break
        if time.monotonic() > give_up:
            return False
        time.sleep(_TURN)
    if facts.folder:
        image.remove(Path(facts.folder))  # what a capture that died had written so far
    return True


def main() -> None:
    """Sleep until the capture has ended or is gone. Exit status 1: it was not put back."""
    facts = json.loads(sys.argv[1])
    select.select([0], [], [])
    if os.read(0, 1) == ALL_WELL:
        return
    if facts["stream"] is not None:
        threading.Thread(target=_drain, args=(facts["stream"],), daemon=True).start()
    sys.exit(0 if _undo(facts["uri"], facts["host"], facts["undo"]) else 1)


if __name__ == "__main__":
    main()
