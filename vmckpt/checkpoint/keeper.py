"""A process beside each capture, in a session of its own: if the capture is killed, it undoes it.

Until then it sleeps. It holds the stream's reading end too, so that QEMU's pipe does not break: a
background snapshot that breaks off leaves the guest hanging until it is freed (see `userfault`).
"""

import json
import os
import select
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Self

ALL_WELL = b"."
_MODULE = "vmckpt.checkpoint.keeper"


class Keeper:
    """The sleeping process. Use as `with Keeper(...)`; leaving the block sends it away."""

    def __init__(
        self, *, uri: str, host: str, undo: str, stream: int | None, module: str = _MODULE
    ) -> None:
        """`undo`: the facts as JSON; `stream`: the pipe's reading end. Raises OSError."""
        facts = json.dumps({"uri": uri, "host": host, "undo": undo, "stream": stream})
        ours, self._line = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, facts],
                stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=() if stream is None else (stream,), start_new_session=True,
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

    def __exit__(self, *_: object) -> None:
        """Whatever happened, the capture itself has put everything back or has said why not."""
        self.tell(ALL_WELL)
        self.leave()

    def leave(self) -> None:
        """Let it do its work, if it has not been told that all is well."""
        os.close(self._line)
        self._process.wait()


def _drain(stream: int) -> None:
    """Take what still comes, to the end."""
    with suppress(OSError):
        while os.read(stream, 1 << 20):
            pass


def _undo(uri: str, host: str, undo: str) -> None:
    # Only now: a keeper that is not needed costs little.
    from vmckpt.checkpoint import settings  # noqa: PLC0415
    from vmckpt.hypervisor.monitor import Monitor  # noqa: PLC0415

    facts = settings.Undo.from_json(undo)
    with Monitor(facts.guest, host=host, uri=uri) as monitor:
        settings.give_up(monitor, facts, at_once=True)
    settings.remove_folder(facts)


def main() -> None:
    """Sleep until the capture has ended or is gone."""
    facts = json.loads(sys.argv[1])
    select.select([0], [], [])
    if os.read(0, 1) == ALL_WELL:
        return
    if facts["stream"] is not None:
        threading.Thread(target=_drain, args=(facts["stream"],), daemon=True).start()
    _undo(facts["uri"], facts["host"], facts["undo"])


if __name__ == "__main__":
    main()
