"""Install the agent's bundle on a host, each version in its own directory.

Agents of other versions keep running. The script that runs on the host is `scripts.install_agent`.
"""

import asyncio
import re
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
"""This machine's Python version and processor, as in the file names of compiled modules."""
LAUNCHER = "bin/vmckpt-agent"
BY_HAND = 'install the agent manually (see "The agent" in docs/hosts.md)'
_SILENCE = Seconds(360.0)
"""How long one step on a host may take: the host tests the agent and syncs it to disk."""
_PIECE = 1 << 18
_MOST_WORDS = 1 << 16
# Prints "found" if the version is installed and starts, otherwise the Pythons on the host.
_LOOK = (
    PROGRAMS
    + r"""
if [ -x "$1/bin/vmckpt-agent" ] && ours "$1/bin/vmckpt-agent" &&
    "$1/bin/vmckpt-agent" --version </dev/null >/dev/null 2>&1
then touch -c "$1/used"; echo found; exit 0; fi
shift
for name in "$@" python3; do
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
    """A version of the agent to be installed on a host."""

    folder: str
    """Directory on the host for all versions."""
    name: str
    digest: str
    """Digest of the bundle's files, in hexadecimal."""
    unpacked: Bytes
    """Total size of the bundle's files."""
    modules: tuple[str, ...]
    """Modules that the host's Python must be able to import."""

    @property
    def launcher(self) -> str:
        """Path of the agent's executable on the host."""
        return f"{self.folder}/{self.name}/{LAUNCHER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPython:
    """A Python that was found on a host."""

    tag: str
    """Version and processor, in the form of `OURS`."""
    path: str


async def inspect_agent(
    remote: Remote, parcel: Parcel, pythons: Sequence[str] = (OURS,)
) -> HostPython | None:
    """Check whether a version of the agent is installed and starts.

    `pythons`: those for which the agent can be sent, the preferred one first, in the form of
    `OURS`. Returns None if the version is installed; otherwise the host's Python for the
    installation. Raises RemoteError if the host has none of them.
    """
    names = [f"python{python_version(tag)}" for tag in pythons]
    told = await remote.run(
        ["sh", "-s", "--", f"{parcel.folder}/{parcel.name}", *names], text=_LOOK
    )
    lines = told.out.splitlines()
    if "found" in lines:
        return None
    found: dict[str, HostPython] = {}
    for line in lines:
        if line.startswith("python ."):
            kind, _, path = line.removeprefix("python .").partition(" ")
            tag = kind.removesuffix(".so")
            found.setdefault(tag, HostPython(tag=tag, path=path))
    for tag in pythons:
        if tag in found and found[tag].path.startswith("/"):
            return found[tag]
    host = remote.host.name
    if not found:
        raise RemoteError(
            f"{host}: vmckpt-agent is not installed, and the host has no python3",
            host=host,
            hint=BY_HAND,
        )
    needed = f"Python {' or '.join(python_version(tag) for tag in pythons)} for {_platform(OURS)}"
    has = " and ".join(map(_described, found))
    raise RemoteError(
        f"{host}: vmckpt-agent is not installed, and no Python on the host can run it: the host has"
        f" {has}, and the agent needs {needed}",
        host=host,
        hint=f"install {needed} on {host}, or {BY_HAND}",
    )


def python_version(tag: str) -> str:
    """Return the version of a Python given in the form of `OURS`, for example "3.11"."""
    digits = tag.split("-")[1]  # "cpython-311-x86_64-linux-gnu"
    return f"{digits[0]}.{''.join(one for one in digits[1:] if one.isdigit())}"


def _described(tag: str) -> str:
    """Return what a host said of its Python; a host can say anything."""
    if not re.fullmatch(r"cpython-\d+\w*-.+", tag):
        return f"Python {tag[:40]!r}"
    return f"Python {python_version(tag)} for {_platform(tag)}"


def _platform(tag: str) -> str:
    """Return the processor and system of a Python, for example "x86_64-linux-gnu"."""
    return tag.split("-", 2)[2]


async def install(remote: Remote, parcel: Parcel, python: str, archive: Path) -> None:
    """Send the bundle to a host and install it there.

    `python`: path of the host's Python; `archive`: the bundle. Raises RemoteError if the
    installation fails; an incomplete version is never left under its name.
    """
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
            f"{remote.host.name}: vmckpt-agent was not installed:"
            f" {last_line(answer.err, f'status {answer.status}')}",
            host=remote.host.name,
            hint=f"fix the cause, or {BY_HAND}",
        )


async def send(remote: Remote, args: Sequence[str], path: Path) -> Answer:
    """Run a command with the file `path` as its input. Returns its exit status and output.

    Keeps only the beginning of a long output. Raises RemoteError if the connection breaks or makes
    no progress for several minutes.
    """
    try:
        with path.open("rb") as file:
            channel = await remote.channel(args)
            try:
                return await asyncio.to_thread(_sent, channel, file)
            finally:
                channel.close()  # also ends the thread if the task was cancelled
    except RemoteError:
        raise
    # Paramiko's thread can fail with any exception on invalid data from the server.
    except Exception as exc:
        reason = last_line(str(exc), type(exc).__name__)
        raise RemoteError(
            f"{remote.host.name}: sending {path.name} failed: {reason}", host=remote.host.name
        ) from exc


def _sent(channel: paramiko.Channel, file: IO[bytes]) -> Answer:
    channel.settimeout(_SILENCE)
    try:
        while piece := file.read(_PIECE):
            channel.sendall(piece)
        channel.shutdown_write()
    except TimeoutError:
        raise
    except OSError:
        pass  # the command has already exited, and its output shows the reason
    out, err = _words(channel.recv), _words(channel.recv_stderr)
    if not channel.status_event.wait(_SILENCE):
        raise TimeoutError("no answer")
    status = channel.recv_exit_status()
    if status < 0:
        raise EOFError("connection lost")
    return Answer(status=status, out=out, err=err)


def _words(read: Callable[[int], bytes]) -> str:
    """Read a stream to its end, and return its beginning."""
    said = bytearray()
    while more := read(1 << 15):
        said += more[: _MOST_WORDS - len(said)]
    return said.decode(errors="replace")
