"""Runs fence agents, on this machine: no shell, nothing on the command line, no word of theirs told
that could hold a secret."""

import asyncio
import os
import shutil
import signal
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from vmckpt.errors import Cancelled, FencingFailed, InventoryError
from vmckpt.model import fencing
from vmckpt.model.fencing import PASSWORD, Action, Decision, Fenced, FenceDevice, Ran, Step
from vmckpt.model.hosts import Host
from vmckpt.units import Seconds

_OFF_LIMIT = Seconds(120.0)
"""Some devices shut a system down before they take its power."""
_STATUS_LIMIT = Seconds(15.0)
_TURN = Seconds(1.0)
_GRACE = Seconds(2.0)
_ANSWERS = Seconds(2.0)
# Agents are there, and in few people's PATH.
_MORE_PLACES = "/usr/sbin:/sbin:/usr/local/sbin"
_LONGEST_PASSWORD = 4096
_LOOKED_AT = 64 << 10


async def power_off(host: Host, stop: asyncio.Event) -> Fenced:
    """See that a host is off; may be repeated.

    Raises FencingFailed if that is not known, InventoryError, and Cancelled if `stop` is set.
    """
    device, began = _device(host), time.monotonic()
    off: Ran | None = None
    status: Ran | None = None
    answered = began
    while True:
        decision = fencing.decide(off, status, Seconds(time.monotonic() - answered))
        match decision.step:
            case Step.SWITCH_OFF:
                off = await run(host, Action.OFF, limit=_OFF_LIMIT, stop=stop)
                answered = time.monotonic()
            case Step.LOOK:
                if status is not None:
                    await asyncio.sleep(_TURN)
                status = await run(host, Action.STATUS, limit=_STATUS_LIMIT, stop=stop)
            case Step.REFUSE:
                raise _refused(host, device, decision)
            case Step.OFF:
                break
    if await _answers(host):
        raise FencingFailed(
            f"{device.agent} says that {host.name} is off, but {host.name} answers: it is about"
            " another machine",
            mend=f"mend fence: of {host.name} in the inventory",
        )
    took = Seconds(time.monotonic() - began)
    return Fenced(host=host.name, agent=device.agent, at=time.time(), took=took)


def _refused(host: Host, device: FenceDevice, decision: Decision) -> FencingFailed:
    return FencingFailed(
        f"{host.name} is not known to be off: {device.agent}: {decision.why}",
        mend="run this again, or switch it off yourself and add --host-is-off",
    )


def _device(host: Host) -> FenceDevice:
    if host.fence is None:
        raise InventoryError(
            f"{host.name} has no fence agent in the inventory",
            mend=f"add fence: {{agent: ..., options: {{...}}}} to {host.name}",
        )
    return host.fence


async def run(
    host: Host, action: Action, *, stop: asyncio.Event, limit: Seconds = _STATUS_LIMIT
) -> Ran:
    """Run a host's agent once; any end of it is an answer, and after `limit` it is ended.

    Raises FencingFailed if it cannot be run, InventoryError, and Cancelled if `stop` is set.
    """
    device = _device(host)
    program = _program(host, device)
    try:
        text = fencing.told(device, action, await asyncio.to_thread(_password, device))
    except ValueError as exc:
        raise InventoryError(f"fence of {host.name}: {exc}") from None
    with tempfile.TemporaryFile() as errors, _in_memory(text) as options:
        try:
            process = await asyncio.create_subprocess_exec(
                program, stdin=options, stdout=asyncio.subprocess.DEVNULL, stderr=errors, cwd="/",
                env={**os.environ, "LC_ALL": "C"}, start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            raise FencingFailed(
                f"{host.name} is not fenced: {program} cannot be run: {exc.strerror or exc}",
                mend="run it by hand to see why",
            ) from exc
        try:
            ended = await _ended(process, stop, limit)
        finally:
            await asyncio.shield(_end(process))
        if not ended and stop.is_set():
            raise Cancelled(
                f"stopped: whether {host.name} is off is not known, and nothing was started in its"
                " place"
            )
        said = fencing.known_words(_words(errors))
    return Ran(process.returncode if ended else None, limit, said)


async def _ended(process: asyncio.subprocess.Process, stop: asyncio.Event, limit: Seconds) -> bool:
    """Wait for its end, a stop, or the time to be up; whether it was its end."""
    waits = [asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        return waits[0].done()
    finally:
        for one in waits:
            one.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """If it has not ended: it, and whatever it has started."""
    if process.returncode is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE)


def _program(host: Host, device: FenceDevice) -> str:
    found = shutil.which(device.agent, path=f"{os.environ.get('PATH', '')}:{_MORE_PLACES}")
    if found is None:
        raise FencingFailed(
            f"{host.name} is not fenced: there is no fence agent {device.agent} on this machine",
            mend="run apt-get install fence-agents, or mend fence: in the inventory",
        )
    return found


def _in_memory(text: bytes) -> IO[bytes]:
    """A file with that text which is on no disk."""
    file = os.fdopen(os.memfd_create("fence"), "w+b", buffering=0)
    file.write(text)
    file.seek(0)
    return file


def _words(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LOOKED_AT))
    return errors.read(_LOOKED_AT).decode(errors="replace")


def _password(device: FenceDevice) -> str | None:
    """Raises InventoryError."""
    path = device.password_file
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            lines = file.read(_LONGEST_PASSWORD).decode().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InventoryError(f"{path}: {reason}", mend="it must hold the password") from None
    if not lines or not lines[0].strip():
        raise InventoryError(f"{path}: its first line has no password")
    fencing.check_option(PASSWORD, lines[0])
    return lines[0]


def too_open(device: FenceDevice) -> Path | None:
    """The password's file, if others than its owner may read or write it."""
    path = device.password_file
    with suppress(OSError):
        if path is not None and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return path
    return None


async def _answers(host: Host) -> bool:
    """Whether somebody listens there: it is not off then, whatever is said of it."""
    if host.ssh is None:
        return False
    with suppress(OSError, TimeoutError):
        reached = asyncio.open_connection(host.ssh.address, host.ssh.port)
        _, writer = await asyncio.wait_for(reached, _ANSWERS)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True
    return False
