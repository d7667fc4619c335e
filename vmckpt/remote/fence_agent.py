"""Run fence agents on this machine.

No shell is used, and no option is passed on the command line. An agent's output is shown only if it
is known to contain no secret.
"""

import asyncio
import os
import shutil
import signal
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from vmckpt.errors import Cancelled, FencingFailed, InventoryError, VmckptError
from vmckpt.model import fencing
from vmckpt.model.fencing import (
    PASSWORD,
    Action,
    Decision,
    Fenced,
    FenceDevice,
    FenceTopology,
    Ran,
    Step,
    Tried,
)
from vmckpt.model.host import Host
from vmckpt.units import Seconds

_OFF_LIMIT = Seconds(120.0)
"""Time limit for `off`: some devices shut the system down before they switch its power off."""
_STATUS_LIMIT = Seconds(15.0)
_TURN = Seconds(1.0)
_GRACE = Seconds(2.0)
_ANSWERS = Seconds(2.0)
# Directories in which agents are installed; few users have these directories in PATH.
_MORE_PLACES = "/usr/sbin:/sbin:/usr/local/sbin"
_LONGEST_PASSWORD = 4096
_WRITE_PASSWORD = "write the password of the fence device to the first line of this file"
_LOOKED_AT = 64 << 10


async def power_off(host: Host, stop: asyncio.Event) -> Fenced:
    """Power a host off with its fence devices. Can be repeated.

    Raises FencingFailed if the host is not known to be off, InventoryError if the host has no fence
    device or a wrong fence configuration, and Cancelled if `stop` is set.
    """
    topology, began = _topology(host), time.monotonic()
    tried, answered = [Tried()], began
    error: VmckptError | None = None
    while True:
        decision = fencing.decide(topology, tried, Seconds(time.monotonic() - answered))
        level, last = len(tried) - 1, tried[-1]
        match decision.step:
            case Step.SWITCH_OFF:
                device = topology.levels[level][decision.number]
                ran, error = await _heard(host, device, Action.OFF, stop)
                tried[-1] = replace(last, off=(*last.off, ran))
                answered = time.monotonic()
            case Step.LOOK:
                if last.looks and decision.number == 0:
                    await asyncio.sleep(_TURN)
                device = topology.levels[level][decision.number]
                ran, error = await _heard(host, device, Action.STATUS, stop)
                tried[-1] = replace(last, looks=(*last.looks, ran))
            case Step.KNOCK:
                tried[-1] = replace(last, host_answers=await _answers(host))
            case Step.NEXT_LEVEL:
                tried.append(Tried())
            case Step.REFUSE:
                raise _refused(host, decision) if error is None or len(tried) > 1 else error
            case Step.OFF:
                return _fenced(host.name, topology, level, began)


async def _heard(
    host: Host, device: FenceDevice, action: Action, stop: asyncio.Event
) -> tuple[Ran, VmckptError | None]:
    """Run an agent once. If the agent cannot be run, return a failed run and the error."""
    limit = _OFF_LIMIT if action is Action.OFF else _STATUS_LIMIT
    try:
        return await run(host, device, action, limit=limit, stop=stop), None
    except (FencingFailed, InventoryError) as exc:
        return Ran(None, limit, error=exc.message.removeprefix(_not_fenced(host))), exc


def _fenced(host: str, topology: FenceTopology, level: int, began: float) -> Fenced:
    return Fenced(
        host=host, agent=topology.level_in_words(level), level=level + 1, at=time.time(),
        devices=tuple(topology.name(*place) for place in topology.places if place[0] == level),
        took=Seconds(time.monotonic() - began),
    )  # fmt: skip


def _not_fenced(host: Host) -> str:
    return f"{host.name} is not fenced: "


def _refused(host: Host, decision: Decision) -> FencingFailed:
    return FencingFailed(
        f"{host.name} is not known to be off: {decision.why}",
        hint="run the command again, or switch the host off yourself and add --host-is-off",
    )


def _topology(host: Host) -> FenceTopology:
    if host.fence is None:
        raise InventoryError(
            f"{host.name} has no fence agent in the inventory",
            hint=f"add fence: {{agent: ..., options: {{...}}}} to {host.name}",
        )
    return host.fence


async def run(
    host: Host, device: FenceDevice, action: Action, *, stop: asyncio.Event,
    limit: Seconds = _STATUS_LIMIT,
) -> Ran:  # fmt: skip
    """Run the agent of one of a host's devices once, and kill it after `limit` seconds.

    Returns the result of the agent, even if the agent failed. Raises FencingFailed if the agent
    cannot be run, InventoryError if the device's options or password file are wrong, and Cancelled
    if `stop` is set.
    """
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
                f"{_not_fenced(host)}{program} cannot be run: {exc.strerror or exc}",
                hint="run the fence agent by hand to see the reason",
            ) from exc
        try:
            ended = await _ended(process, stop, limit)
        finally:
            await asyncio.shield(_end(process))
        if not ended and stop.is_set():
            raise Cancelled(
                f"stopped: it is unknown whether {host.name} is off; nothing was started on another"
                " host"
            )
        said = fencing.known_words(_words(errors))
    return Ran(process.returncode if ended else None, limit, said)


async def _ended(process: asyncio.subprocess.Process, stop: asyncio.Event, limit: Seconds) -> bool:
    """Wait for the process to exit, up to `limit` or until `stop`. Returns whether it exited."""
    waits = [asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        return waits[0].done()
    finally:
        for one in waits:
            one.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its children, if the process is still running."""
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
            f"{_not_fenced(host)}fence agent {device.agent} is not installed on this machine",
            hint="run apt-get install fence-agents, or correct the agent's name in the inventory",
        )
    return found


def _in_memory(text: bytes) -> IO[bytes]:
    """Return an open file that exists only in memory, with this content."""
    file = os.fdopen(os.memfd_create("fence"), "w+b", buffering=0)
    file.write(text)
    file.seek(0)
    return file


def _words(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LOOKED_AT))
    return errors.read(_LOOKED_AT).decode(errors="replace")


def _password(device: FenceDevice) -> str | None:
    """Return the device's password; None without a password file.

    Raises InventoryError, and ValueError if the password is not one line of printable text.
    """
    path = device.password_file
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            lines = file.read(_LONGEST_PASSWORD).decode().splitlines()
    except FileNotFoundError as exc:
        raise InventoryError(f"{path}: {exc.strerror}", hint=_WRITE_PASSWORD) from None
    except OSError as exc:
        raise InventoryError(
            f"{path}: {exc.strerror}", hint="make the file readable for the user that runs vmckpt"
        ) from None
    except UnicodeDecodeError:
        raise InventoryError(f"{path}: not UTF-8", hint=_WRITE_PASSWORD) from None
    if not lines or not lines[0].strip():
        raise InventoryError(f"{path}: the first line is empty", hint=_WRITE_PASSWORD)
    fencing.check_option(PASSWORD, lines[0])
    return lines[0]


def too_open(topology: FenceTopology) -> tuple[Path, ...]:
    """Return the password files that users other than their owner can read or write."""
    found = []
    devices = [one for level in topology.levels for one in level]
    for path in dict.fromkeys(one.password_file for one in devices if one.password_file):
        with suppress(OSError):
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                found.append(path)
    return tuple(found)


async def _answers(host: Host) -> bool:
    """Return whether the host accepts ssh connections; if so, the host is not off."""
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
