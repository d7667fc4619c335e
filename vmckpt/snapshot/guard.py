"""Programs of the operator, run on this machine: what a guard watches over, checks, hooks."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from vmckpt.errors import BadInput
from vmckpt.units import Seconds

_SHELL = "/bin/sh"
_GRACE = Seconds(5.0)


class Outside:
    """Runs one program at a time; `pass_on` may be called from a signal's handler."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet`: what they print goes to stderr, so that stdout is ours alone."""
        self._quiet = quiet
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, words: Sequence[str], told: Mapping[str, str]) -> int:
        """Run a program to its end; its exit status, or minus the signal that ended it.

        `told`: added to its environment. Raises BadInput if it cannot be started.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *words,
                env={**os.environ, **told},
                stdout=sys.stderr.fileno() if self._quiet else None,
            )
        except OSError as exc:
            raise BadInput(f"{words[0]}: cannot be run: {exc.strerror or exc}") from exc
        try:
            return await self._process.wait()
        finally:
            await self._ended(self._process)
            self._process = None

    async def shell(self, command: str, told: Mapping[str, str], limit: Seconds | None) -> int:
        """Run a line of shell; its exit status. After `limit` it is ended: TimeoutError."""
        running = self.run([_SHELL, "-c", command], told)
        return await asyncio.wait_for(running, None if limit is None else float(limit))

    def pass_on(self, number: int) -> None:
        """Give a signal to what runs, if anything does."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @staticmethod
    async def _ended(process: asyncio.subprocess.Process) -> None:
        """Whoever gives up waiting leaves nothing running."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is not None:
                return
            with suppress(ProcessLookupError):
                process.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE)


def in_words(status: int) -> str:
    """How a program ended."""
    if status >= 0:
        return f"it ended with {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"
