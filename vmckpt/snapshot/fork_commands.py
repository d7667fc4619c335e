"""Run an operator's command on the controller once per fork, several at a time."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from vmckpt.snapshot.fork_rules import Ran
from vmckpt.units import Seconds

_SHELL = "/bin/sh"
_GRACE = Seconds(5.0)
_MOST = 1 << 20
"""Bytes of output that are kept per command and stream: the end of the output."""
_NOT_RUN = 127
"""A shell's exit status for a command that cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCommand:
    """A shell command for one fork."""

    name: str
    """Name of the fork."""
    command: str
    environment: Mapping[str, str]
    """Variables that are added to the environment."""


async def run_all(
    commands: Sequence[ForkCommand], parallel: int, stop: asyncio.Event,
    ended: Callable[[Ran], None],
) -> tuple[Ran, ...]:  # fmt: skip
    """Run commands, at most `parallel` at a time. Returns the results in the order of their ends.

    `ended` is called with each result. Setting `stop` ends the running commands, and starts no
    more. Running commands are also ended if this function is cancelled.
    """
    free, done = asyncio.Semaphore(parallel), list[Ran]()

    async def one(command: ForkCommand) -> None:
        async with free:
            if stop.is_set():
                return
            ran = await _run(command, stop)
            done.append(ran)
            ended(ran)

    async with asyncio.TaskGroup() as group:
        for command in commands:
            group.create_task(one(command))
    return tuple(done)


async def _run(command: ForkCommand, stop: asyncio.Event) -> Ran:
    began = time.monotonic()
    # Files, because a pipe stays open as long as a process that the command left behind.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            # In a session of its own, the command and its children can be ended together.
            process = await asyncio.create_subprocess_exec(
                _SHELL, "-c", command.command, env={**os.environ, **command.environment},
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            why = f"cannot run {_SHELL}: {exc.strerror or exc}"
            return Ran(name=command.name, status=_NOT_RUN, took=Seconds(0.0), output="", errors=why)
        waits = asyncio.create_task(process.wait())
        stops = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({waits, stops}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stops.cancel()
            await _end(process)
        return Ran(
            name=command.name, status=await waits, output=_end_of(output), errors=_end_of(errors),
            took=Seconds(time.monotonic() - began),
        )  # fmt: skip


def _end_of(file: BinaryIO) -> str:
    """Return the last part of what was written to a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST))
    return file.read(_MOST).decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate a command that is still running, and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE)
