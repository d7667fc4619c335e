"""Whether a host has the agent, which Python it could be installed for, and how it is sent."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vmckpt.errors import RemoteError
from vmckpt.model.host import Host
from vmckpt.remote import agent_install
from vmckpt.remote.agent_install import LAUNCHER, OURS, Parcel
from vmckpt.remote.ssh import Answer
from vmckpt.units import Bytes

HOST = Host(name="alpha", uri="")


class Channel:
    """A program that takes its input up to some piece, and ends so."""

    def __init__(self, status: int, *, takes: int = 1 << 30, said: bytes = b"") -> None:
        self.status, self.takes, self.said = status, takes, [b"", said]
        self.got = b""
        self.closed = False
        self.status_event = threading.Event()
        self.status_event.set()

    def settimeout(self, _: float) -> None: ...

    def sendall(self, data: bytes) -> None:
        if len(self.got) + len(data) > self.takes:
            raise OSError("Socket is closed")
        self.got += data

    def shutdown_write(self) -> None: ...

    def recv(self, _: int) -> bytes:
        return b""

    def recv_stderr(self, _: int) -> bytes:
        return self.said.pop() if self.said else b""

    def recv_exit_status(self) -> int:
        return self.status

    def close(self) -> None:
        self.closed = True


class Remote:
    """This machine, with a path of its own."""

    host = HOST

    def __init__(self, path: Path, channel: Channel | None = None) -> None:
        self.path, self.opened = path, channel
        self.args: Sequence[str] = ()

    async def run(self, args: Sequence[str], *, text: str) -> Answer:
        return await asyncio.to_thread(self._run, args, text)

    def _run(self, args: Sequence[str], text: str) -> Answer:
        done = subprocess.run(
            args, input=text, capture_output=True, text=True, check=False,
            env={"PATH": f"{self.path}:/usr/bin:/bin"},
        )  # fmt: skip
        return Answer(status=done.returncode, out=done.stdout, err=done.stderr)

    async def channel(self, args: Sequence[str]) -> Channel:
        self.args = args
        assert self.opened is not None
        return self.opened


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def parcel(folder: Path) -> Parcel:
    return Parcel(
        folder=str(folder), name="v1", digest="00", unpacked=Bytes(9), modules=("vmckpt", "numpy")
    )


def looked(
    remote: Any, folder: Path, pythons: tuple[str, ...] = (OURS,)
) -> agent_install.HostPython | None:
    return asyncio.run(agent_install.inspect_agent(remote, parcel(folder), pythons))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "path").mkdir()
    return tmp_path / "path"


def test_a_python_of_our_kind_is_found_by_its_path(path: Path, tmp_path: Path) -> None:
    program(path / "python3", f'exec {sys.executable} "$@"')
    found = looked(Remote(path), tmp_path / "versions")
    assert found is not None
    assert found.tag == OURS
    assert Path(found.path).is_absolute()
    assert Path(found.path).exists()


OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


def other(minor: int) -> str:
    """Another version of Python, for this processor."""
    return OURS.replace(OWN.replace(".", ""), f"3{minor}")


def test_one_of_another_kind_is_named_with_ours(path: Path, tmp_path: Path) -> None:
    for name in ("python3", f"python{OWN}"):
        program(path / name, "echo python .cpython-27-vax.so /bin/python2")
    with pytest.raises(
        RemoteError,
        match=f"the host has Python 2.7 for vax, and the agent needs Python {OWN} for x86_64",
    ):
        looked(Remote(path), tmp_path / "versions")


def test_the_preferred_of_several_pythons_is_used(path: Path, tmp_path: Path) -> None:
    """A host whose python3 is too old may have another one beside it."""
    program(path / "python3", "echo python .cpython-39-x86_64-linux-gnu.so /bin/python3.9")
    for minor in (91, 92):
        program(path / f"python3.{minor}", f"echo python .{other(minor)}.so /bin/python3.{minor}")
    program(path / f"python{OWN}", "exit 1")
    found = looked(Remote(path), tmp_path / "versions", (OURS, other(92), other(91)))
    assert found == agent_install.HostPython(tag=other(92), path="/bin/python3.92")

    with pytest.raises(RemoteError, match=rf"needs Python {OWN} or 3\.90 for x86_64") as failed:
        looked(Remote(path), tmp_path / "versions", (OURS, other(90)))
    assert f"install Python {OWN} or 3.90 for x86_64" in str(failed.value.hint)


def test_a_host_that_says_anything_of_its_python_is_quoted(path: Path, tmp_path: Path) -> None:
    for name in ("python3", f"python{OWN}"):
        program(path / name, "echo python .strange.so /bin/python3")
    with pytest.raises(RemoteError, match=r"the host has Python 'strange', and the agent needs"):
        looked(Remote(path), tmp_path / "versions")


def sent(channel: Channel, folder: Path) -> Remote:
    archive = folder / "archive"
    archive.write_bytes(bytes(range(256)) * 4096)
    remote: Any = Remote(folder, channel)
    asyncio.run(agent_install.install(remote, parcel(folder), "/bin/python", archive))
    assert channel.got == archive.read_bytes()
    return remote  # type: ignore[no-any-return]


def test_all_of_it_is_sent_with_what_it_must_become(tmp_path: Path) -> None:
    channel = Channel(0)
    args = sent(channel, tmp_path).args
    assert [*args[:3], *args[4:]] == [
        "/bin/python", "-I", "-c", str(tmp_path), "v1", "00", "9", "import vmckpt, numpy"
    ]  # fmt: skip
    assert "def install(" in args[3]
    assert channel.closed
    assert parcel(Path("/x")).launcher == f"/x/v1/{LAUNCHER}"


@pytest.mark.parametrize("takes", [1 << 30, 1 << 18])
def test_an_installer_that_ends_early_says_why(tmp_path: Path, takes: int) -> None:
    channel = Channel(1, takes=takes, said=b"/x: no room for 9 MiB\n")
    with pytest.raises(RemoteError, match="was not installed: /x: no room for 9 MiB"):
        sent(channel, tmp_path)
    assert channel.closed


def test_a_connection_that_breaks_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="alpha: sending archive failed: connection lost"):
        sent(Channel(-1), tmp_path)
