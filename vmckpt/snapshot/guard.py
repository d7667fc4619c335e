"""Run the operator's commands on the controller: guarded commands, checks and hooks."""

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
    """Runs one command at a time; `pass_on` may be called from a signal handler."""

    def __init__(self, *, quiet: bool = False) -> None:
        """With `quiet`, the commands' stdout is redirected to stderr."""
        self._quiet = quiet
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, words: Sequence[str], told: Mapping[str, str]) -> int:
        """Run a command until it exits. Returns its exit status, or -N if signal N killed it.

        `told`: variables added to its environment. Raises BadInput if the command cannot be
        started.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *words,
                env={**os.environ, **told},
                stdout=sys.stderr.fileno() if self._quiet else None,
            )
        except OSError as exc:
            raise BadInput(f"cannot run {words[0]}: {exc.strerror or exc}") from exc
        try:
            return await self._process.wait()
        finally:
            await self._ended(self._process)
            self._process = None

    async def shell(self, command: str, told: Mapping[str, str], limit: Seconds | None) -> int:
        """Run a shell command. Returns its exit status as `run` does.

        After `limit` seconds, the command is killed and TimeoutError is raised. Raises BadInput.
        """
        running = self.run([_SHELL, "-c", command], told)
        return await asyncio.wait_for(running, None if limit is None else float(limit))

    def pass_on(self, number: int) -> None:
        """Send a signal to the command, if it is running."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @staticmethod
    async def _ended(process: asyncio.subprocess.Process) -> None:
        """Terminate a command that is still running, as the caller no longer waits for it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is not None:
                return
            with suppress(ProcessLookupError):
                process.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE)


def in_words(status: int) -> str:
    """Describe how a command exited, given the status from `Outside.run`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
