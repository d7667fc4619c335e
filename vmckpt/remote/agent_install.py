"""Brings the agent's bundle to a host: a folder of its own for each version, beside the others.

What runs from another version is not touched by that; `scripts.install_agent` is what runs there.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import machinery, resources
from pathlib import Path
from typing import IO

import paramiko

from vmckpt.errors import RemoteError
from vmckpt.remote.shell_files import PROGRAMS
from vmckpt.remote.ssh import Answer, Remote, last_line
from vmckpt.units import Bytes, Seconds

OURS = machinery.EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")
"""Python, its version, and the processor, as compiled modules are named for them."""
LAUNCHER = "bin/vmckpt-agent"
BY_HAND = "install it there by hand: docs/hosts.md, The agent"
_SILENCE = Seconds(360.0)
"""How long a host may need for one step: it tries the agent and waits for its disk."""
_PIECE = 1 << 18
_MOST_WORDS = 1 << 16
# What is there and starts; else the Pythons that it could be installed for.
_LOOK = (
    PROGRAMS
    + r"""
if [ -x "$1/bin/vmckpt-agent" ] && ours "$1/bin/vmckpt-agent" &&
    "$1/bin/vmckpt-agent" --version </dev/null >/dev/null 2>&1
then touch -c "$1/used"; echo found; exit 0; fi
for name in "$2" python3; do
    python=$(command -v "$name") || continue
    "$python" -c 'import sys
from importlib import machinery
print("python", machinery.EXTENSION_SUFFIXES[0], sys.executable)' </dev/null 2>/dev/null
done
exit 0
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What is to be on the host."""

    folder: str
    """There, for all versions."""
    name: str
    digest: str
    """Hexadecimal; of its files."""
    unpacked: Bytes
    modules: tuple[str, ...]
    """What must be there to be imported."""

    @property
    def launcher(self) -> str:
        return f"{self.folder}/{self.name}/{LAUNCHER}"


async def inspect_agent(remote: Remote, parcel: Parcel) -> str | None:
    """None: it is there. Else the Python that it can be installed for.

    Raises RemoteError if there is none.
    """
    name = "python" + ".".join(_version(OURS))
    told = await remote.run(["sh", "-s", "--", f"{parcel.folder}/{parcel.name}", name], text=_LOOK)
    lines = told.out.splitlines()
    if "found" in lines:
        return None
    pythons = [line.split(" ", 2)[1:] for line in lines if line.startswith("python .")]
    for kind, path in pythons:
        if kind.strip(".").removesuffix(".so") == OURS and path.startswith("/"):
            return path
    host = remote.host.name
    if not pythons:
        raise RemoteError(f"{host}: no vmckpt-agent and no python3 there", hint=BY_HAND)
    theirs = pythons[0][0].strip(".").removesuffix(".so")
    raise RemoteError(
        f"{host}: no vmckpt-agent there, and ours does not fit: its Python is {theirs}, ours is"
        f" {OURS}",
        hint=BY_HAND,
    )


def _version(tag: str) -> tuple[str, str]:
    digits = tag.split("-")[1]  # "cpython-311-x86_64-linux-gnu"
    return digits[0], "".join(one for one in digits[1:] if one.isdigit())


async def install(remote: Remote, parcel: Parcel, python: str, archive: Path) -> None:
    """Send it and have it unpacked. Raises RemoteError: nothing of it is there then."""
    text = resources.files("vmckpt.remote.scripts").joinpath("install_agent.py").read_text()
    answer = await send(
        remote,
        [
            python, "-I", "-c", text, parcel.folder, parcel.name, parcel.digest,
            str(parcel.unpacked), f"import {', '.join(parcel.modules)}",
        ],
        archive,
    )  # fmt: skip
    if answer.status != 0:
        raise RemoteError(
            f"{remote.host.name}: the agent was not installed:"
            f" {last_line(answer.err, f'status {answer.status}')}",
            hint=f"mend that, or {BY_HAND}",
        )


async def send(remote: Remote, args: Sequence[str], path: Path) -> Answer:
    """Run a command with a file as its input; any exit status is an answer. It may say little.

    Raises RemoteError if the connection breaks, or nothing happens for long.
    """
    try:
        with path.open("rb") as file:
            channel = await remote.channel(args)
            try:
                return await asyncio.to_thread(_sent, channel, file)
            finally:
                channel.close()  # whoever gives up need not wait for the thread
    except RemoteError:
        raise
    # Paramiko hands on whatever its thread met in what the server sent.
    except Exception as exc:
        reason = last_line(str(exc), type(exc).__name__)
        raise RemoteError(f"{remote.host.name}: sending {path.name} broke: {reason}") from exc


def _sent(channel: paramiko.Channel, file: IO[bytes]) -> Answer:
    channel.settimeout(_SILENCE)
    try:
        while piece := file.read(_PIECE):
            channel.sendall(piece)
        channel.shutdown_write()
    except TimeoutError:
        raise
    except OSError:
        pass  # it has ended before, and says why
    out, err = _words(channel.recv), _words(channel.recv_stderr)
    if not channel.status_event.wait(_SILENCE):
        raise TimeoutError("no answer")
    status = channel.recv_exit_status()
    if status < 0:
        raise EOFError("the connection is gone")
    return Answer(status=status, out=out, err=err)


def _words(read: Callable[[int], bytes]) -> str:
    """What it says, up to a bound."""
    said = bytearray()
    while more := read(1 << 15):
        said += more[: _MOST_WORDS - len(said)]
    return said.decode(errors="replace")
