"""Ssh servers that say nonsense, say it without an end, or say nothing at all."""

import errno
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import paramiko
import pytest

from tests.support.shell import HOSTILE
from tests.support.ssh_servers import KEY, Behave, Sshd, sshd
from vmckpt.errors import HostKeyRefused, RemoteError
from vmckpt.model.host import Host, SshAddress
from vmckpt.remote import ssh
from vmckpt.remote.ssh import Remote
from vmckpt.units import Seconds

__all__ = ["sshd"]


@pytest.fixture
async def remote(sshd: Sshd, tmp_path: Path) -> AsyncIterator[Remote]:
    key, known = tmp_path / "key", tmp_path / "known"
    KEY.write_private_key_file(str(key))
    known.write_text(f"[127.0.0.1]:{sshd.port} {KEY.get_name()} {KEY.get_base64()}\n")
    where = SshAddress(address="127.0.0.1", port=sshd.port, key_file=key, known_hosts=known)
    async with Remote(Host(name="alpha", uri="qemu:///system", ssh=where)) as one:
        yield one


async def told(remote: Remote, *, limit: float = 0.4, within: float = 3.0) -> str:
    """The one line with which a command fails, and soon."""
    began = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        await remote.run(["uname", "-a"], limit=Seconds(limit))
    assert time.monotonic() - began < within
    line = str(caught.value)
    assert line.startswith("alpha: ")
    assert caught.value.host == "alpha"
    assert "\n" not in line
    assert len(line) < 500
    return line


def answer(out: bytes, err: bytes = b"", status: int = 0) -> Behave:
    def behave(channel: paramiko.Channel, _command: bytes) -> None:
        channel.sendall(out)
        channel.sendall_stderr(err)
        channel.send_exit_status(status)
        channel.close()

    return behave


async def test_an_answer_is_an_answer(sshd: Sshd, remote: Remote) -> None:
    sshd.behave = answer(b"x" * 3_000_000, b"\xff" * 3_000_000, 7)

    seen = await remote.run(["uname"])

    assert (seen.status, seen.out) == (7, "x" * 3_000_000)
    assert seen.err == "�" * 3_000_000


async def test_small_messages_do_not_wait_for_each_other(sshd: Sshd, remote: Remote) -> None:
    sshd.behave = answer(b"")
    await remote.run(["uname"])

    assert remote._client is not None
    transport = remote._client.get_transport()
    assert transport is not None
    assert isinstance(transport.sock, socket.socket)
    assert transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_arguments_arrive_as_they_are_through_a_real_shell(
    sshd: Sshd, remote: Remote, tmp_path: Path
) -> None:
    def behave(channel: paramiko.Channel, command: bytes) -> None:
        done = subprocess.run(
            [b"/bin/sh", b"-c", command], capture_output=True, check=False, cwd=tmp_path
        )
        answer(done.stdout, done.stderr, done.returncode)(channel, command)

    sshd.behave = behave

    seen = await remote.run(["printf", "%s\\0", *HOSTILE])

    expected = [os.fsencode(one).decode(errors="replace") for one in HOSTILE]
    assert seen.out.split("\0")[:-1] == expected
    assert sorted(os.listdir(tmp_path)) == ["key", "known"]  # noqa: PTH208 - it blocks no less


@pytest.mark.parametrize("stream", ["out", "err"])
async def test_output_without_an_end_is_not_read_to_its_end(
    sshd: Sshd, remote: Remote, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behave(channel: paramiko.Channel, _command: bytes) -> None:
        while True:
            (channel.sendall if stream == "out" else channel.sendall_stderr)(b"y\n" * 10_000)

    monkeypatch.setattr(ssh, "_MOST_OUTPUT", 1 << 20)
    sshd.behave = behave

    assert "uname printed more than 1 MiB; make sure that" in await told(remote, limit=5.0)


async def test_output_that_drips_is_not_waited_for(sshd: Sshd, remote: Remote) -> None:
    def behave(channel: paramiko.Channel, _command: bytes) -> None:
        while True:
            channel.sendall(b".")
            time.sleep(0.05)

    sshd.behave = behave

    assert await told(remote) == "alpha: uname: no answer within 0.4 s"


async def test_an_end_without_a_status_is_not_waited_for(sshd: Sshd, remote: Remote) -> None:
    def behave(channel: paramiko.Channel, _command: bytes) -> None:
        channel.shutdown_write()  # no status, and no closing
        time.sleep(2)

    sshd.behave = behave

    assert await told(remote) == "alpha: uname: no answer within 0.4 s"


@pytest.mark.parametrize("what", ["opens", "starts"])
async def test_a_channel_that_is_never_granted_is_not_waited_for(
    sshd: Sshd, remote: Remote, what: str
) -> None:
    setattr(sshd, what, False)

    assert "uname" in await told(remote)


async def test_a_closed_channel_is_an_answer_without_success(sshd: Sshd, remote: Remote) -> None:
    assert (await remote.run(["uname"])).status != 0


def garbage(line: socket.socket) -> bool:
    line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200)
    return False


def packets(line: socket.socket) -> bool:
    line.sendall(b"SSH-2.0-x\r\n" + os.urandom(2000) + b"\xff" * 2000)
    return False


def endless(line: socket.socket) -> bool:
    while True:
        line.sendall(b"x" * 1000)
        time.sleep(0.01)


def silent(line: socket.socket) -> bool:
    time.sleep(3)
    return False


@pytest.mark.parametrize("greet", [garbage, packets, endless, silent])
async def test_a_server_that_is_none_is_one_line(
    sshd: Sshd, remote: Remote, greet: Callable[[socket.socket], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ssh, "CONNECT_LIMIT", 0.5)
    monkeypatch.setattr(ssh, "_ENTER_LIMIT", 0.8)
    sshd.greet = greet

    assert "ssh to 127.0.0.1" in await told(remote)


@pytest.mark.parametrize("address", ["a\0b", "x" * 300, "a..b", "", "-oProxyCommand=x", "\udcff"])
async def test_an_address_that_is_none_is_one_line(address: str) -> None:
    where = SshAddress(address=address, known_hosts=Path("/dev/null"))

    await told(Remote(Host(name="alpha", uri="qemu:///system", ssh=where)))


async def test_an_argument_that_no_line_carries_is_one_line(sshd: Sshd, remote: Remote) -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(RemoteError, match=r"alpha: cannot run 'rm ") as caught:
            await remote.run(["rm", name])
        assert "\0" not in str(caught.value)


async def test_an_error_about_an_unknown_key_has_the_name_of_the_host(
    sshd: Sshd, tmp_path: Path
) -> None:
    key, known = tmp_path / "key", tmp_path / "known"
    KEY.write_private_key_file(str(key))
    known.write_text("")
    where = SshAddress(address="127.0.0.1", port=sshd.port, key_file=key, known_hosts=known)
    async with Remote(Host(name="alpha", uri="qemu:///system", ssh=where)) as one:
        with pytest.raises(HostKeyRefused, match="unknown ssh host key") as caught:
            await one.run(["uname"])
    assert caught.value.host == "alpha"


async def test_a_hostile_known_hosts_file_is_passed_over(tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_bytes(b"\0\xff\n@revoked\na b\na ssh-rsa AAAA\na ssh-ed25519 !!!\n|1|x|y z w\n" * 9)
    keys = paramiko.HostKeys()

    ssh._know(keys, known)

    assert len(keys) == 0


async def test_a_host_that_says_anything_at_all_is_not_silent(sshd: Sshd, remote: Remote) -> None:
    def rude(line: socket.socket) -> bool:
        line.sendall(b"go away\r\n" * 40)
        return False

    sshd.greet = rude
    with pytest.raises(RemoteError) as caught:
        await remote.run(["uname"])
    assert not caught.value.silent
    sshd.close()
    with pytest.raises(RemoteError, match="refused") as caught:
        await remote.run(["uname"])
    assert not caught.value.silent


@pytest.mark.parametrize(
    ("error", "silent"),
    [
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        (socket.gaierror(socket.EAI_NONAME, "not known"), False),
    ],
)
async def test_who_does_not_answer_in_any_way_is_silent(
    error: OSError, silent: bool, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(RemoteError) as caught:
        await remote.run(["uname"])
    assert caught.value.silent is silent


async def test_a_login_without_an_end_is_no_silence(
    sshd: Sshd, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "_ENTER_LIMIT", 0.4)
    sshd.greet = lambda _line: False
    with pytest.raises(RemoteError) as caught:
        await remote.run(["uname"])
    assert not caught.value.silent
    assert "connected, but the login took more than 0.4 s" in caught.value.message


def test_a_host_without_a_login_is_refused_with_the_entry_that_it_needs() -> None:
    with pytest.raises(RemoteError) as caught:
        Remote(Host(name="alpha", uri="qemu:///system"))
    assert caught.value.hint == "add ssh: {address: ADDRESS} to the host in the inventory"
