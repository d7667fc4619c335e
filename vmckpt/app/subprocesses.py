"""Start vmckpt's own commands, each as a process that outlives this one.

The dashboard runs the same commands that operators type. A migration started from the dashboard
continues when the dashboard is closed or its terminal is lost.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from vmckpt.model.events import Begun, Said

PROGRAM = (sys.executable, "-P", "-m", "vmckpt.cli.app")
_MOST = 1 << 20
"""Number of bytes that are read from the end of a command's output."""


class Processes:
    """Runs commands as processes on this machine. `more`: variables added to their environment."""

    def __init__(self, more: Mapping[str, str]) -> None:
        self._more = more

    async def ask(self, words: Sequence[str], width: int) -> Said:
        """Run a command to its end; see model.events.Commands."""
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=self._environment(width), start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # including its child processes
                await process.wait()
        return Said(text=_text(out), code=process.returncode)

    def start(self, words: Sequence[str], width: int) -> Begun:
        """Start a command and return at once; see model.events.Commands."""
        # An unnamed file lets the command keep writing after this process is gone.
        file = tempfile.TemporaryFile()  # noqa: SIM115  # _Process closes it
        # In its own session, the command survives Ctrl-C in this terminal and the loss of the
        # terminal.
        process = subprocess.Popen(
            [*PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=self._environment(width), start_new_session=True,
        )  # fmt: skip
        return _Process(tuple(words), process, file)

    def _environment(self, width: int) -> dict[str, str]:
        return {**os.environ, **self._more, "VMCKPT_WIDTH": str(width), "PYTHONUNBUFFERED": "1"}


class _Process:
    """A command that was started; see model.events.Begun."""

    def __init__(
        self, words: tuple[str, ...], process: subprocess.Popen[bytes], file: IO[bytes]
    ) -> None:
        self.words, self.pid = words, process.pid
        self._process, self._file = process, file
        self._last: Said | None = None

    def said(self) -> Said:
        if self._last is not None:
            return self._last
        code = self._process.poll()
        told = Said(text=self._read(), code=code)
        if code is not None:
            self._last = told
            self._file.close()
        return told

    def _read(self) -> str:
        size = os.fstat(self._file.fileno()).st_size
        return _text(os.pread(self._file.fileno(), _MOST, max(0, size - _MOST)))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
