"""Run commands on a host over ssh. The host's key is always verified.

An unknown or changed key is refused, and the error shows the line to add; keys are never added
automatically. Connecting is retried, since it changes nothing; a command is never retried.

`drop` closes the target's end of a broken migration stream. The target's QEMU waits for pages and
cannot detect that the source is gone, since TCP does not report this. QEMU gives up only when its
socket is closed, and libvirt cannot close the socket while QEMU is waiting.
"""

import asyncio
import base64
import errno
import hashlib
import shlex
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from vmckpt.errors import HostKeyRefused, RemoteError
from vmckpt.model.host import ADD_SSH, Host, SshAddress
from vmckpt.units import Seconds

_KEEPALIVE = 30
"""Interval of keepalive messages, in seconds: firewalls drop connections that are idle for minutes.
"""
CONNECT_LIMIT = 8.0
COMMAND_LIMIT = Seconds(20.0)
# Limit for the complete login: a server that sends a byte now and then never exceeds the limits of
# the individual steps.
_ENTER_LIMIT = 3 * CONNECT_LIMIT
_MOST_OUTPUT = 8 << 20
_MOST_KNOWN_HOSTS = 16 << 20
_LONGEST_WORDS = 200
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The exit status and output of a command on a host."""

    status: int
    out: str
    err: str


def command_line(args: Sequence[str]) -> bytes:
    """Quote arguments so that the shell of a host's ssh server splits them again unchanged.

    All commands on hosts are quoted here. Raises ValueError if an argument cannot be passed.
    """
    line = shlex.join(args).encode("utf-8", "surrogateescape")
    if b"\0" in line:
        raise ValueError("an argument contains a zero byte")
    return line


def last_line(text: str, otherwise: str) -> str:
    """Return the last line of a command's output, for messages; `otherwise` if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_WORDS] if lines else otherwise


class _TooMuch(Exception):
    """The output of a command exceeds the limit."""


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Refuses unknown host keys, with an error that shows how to add the key."""

    def __init__(self, where: SshAddress) -> None:
        self._where = where

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        raise HostKeyRefused(
            f"{hostname}: unknown ssh host key {fingerprint(key)}",
            hint=f"verify the key on the host, then add this line to {_file_to_edit(self._where)}:"
            f" {hostname} {key.get_name()} {key.get_base64()}",
        )


def fingerprint(key: paramiko.PKey) -> str:
    """Return a key's type and fingerprint, as printed by `ssh-keygen -l`."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


def _file_to_edit(where: SshAddress) -> Path:
    return where.known_hosts or Path("~/.ssh/known_hosts").expanduser()


class Remote:
    """One host over ssh. The connection is opened at the first command and kept.

    Use as `async with Remote(host) as remote`.
    """

    def __init__(self, host: Host) -> None:
        """Raises RemoteError if the host has no ssh address."""
        if host.ssh is None:
            raise RemoteError(
                f"{host.name} has no ssh address in the inventory",
                host=host.name,
                hint=ADD_SSH,
            )
        self.host = host
        self._where = host.ssh
        self._client: paramiko.SSHClient | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> "Remote":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    async def open(self) -> None:
        """Open the connection, so that the first command need not wait for it.

        Raises RemoteError or HostKeyRefused.
        """
        await self._connected()

    async def run(
        self, args: Sequence[str], *, text: str = "", limit: Seconds = COMMAND_LIMIT
    ) -> Answer:
        """Run one command with `text` as its input. Returns its exit status and output.

        The output is limited to 8 MiB. Raises RemoteError if there is no connection, or if the
        command exceeds this or `limit`; HostKeyRefused if the host's key is unknown or has changed.
        """
        client = await self._connected()
        return await asyncio.to_thread(self._run, client, args, text, limit)

    async def channel(self, args: Sequence[str]) -> paramiko.Channel:
        """Start a command and return its channel with open streams.

        Raises RemoteError or HostKeyRefused.
        """
        client = await self._connected()
        return await asyncio.to_thread(self._start, client, args)

    async def _connected(self) -> paramiko.SSHClient:
        async with self._opening:
            if self._client is None or not _alive(self._client):
                self._client = await asyncio.to_thread(self._connect)
            return self._client

    def _start(self, client: paramiko.SSHClient, args: Sequence[str]) -> paramiko.Channel:
        try:
            transport = client.get_transport()
            if transport is None:
                raise EOFError("no connection")
            channel = transport.open_session(timeout=CONNECT_LIMIT)
            line = command_line(args)
            channel.exec_command(line)
        # Paramiko's thread can fail with any exception on invalid data from the server.
        except Exception as exc:
            reason = last_line(str(exc), type(exc).__name__)
            raise RemoteError(
                f"{self.host.name}: cannot start {args[0]}: {reason}", host=self.host.name
            ) from exc
        return channel

    def _connect(self) -> paramiko.SSHClient:
        for attempt in Retrying(
            retry=retry_if_exception_type(OSError),
            stop=stop_after_attempt(2),
            wait=wait_fixed(0.3),
            reraise=True,
        ):
            with attempt:
                return self._connect_once()
        raise AssertionError("tenacity ends with a result or an error")

    def _connect_once(self) -> paramiko.SSHClient:
        client, where = paramiko.SSHClient(), self._where
        for path in [where.known_hosts] if where.known_hosts else _usual_known_hosts():
            _know(client.get_host_keys(), path)
        client.set_missing_host_key_policy(_Refuse(where))
        name = self.host.name
        try:
            with _entering(where) as line:
                client.connect(
                    where.address,
                    where.port,
                    where.user,
                    key_filename=str(where.key_file) if where.key_file else None,
                    look_for_keys=where.key_file is None,
                    timeout=CONNECT_LIMIT,
                    banner_timeout=CONNECT_LIMIT,
                    auth_timeout=CONNECT_LIMIT,
                    sock=line,
                )
        except HostKeyRefused as exc:
            client.close()
            exc.host = name  # the policy knows only the address
            raise
        except paramiko.BadHostKeyException as exc:
            client.close()
            raise HostKeyRefused(
                f"{name}: ssh host key of {where.address} has changed: the host sent"
                f" {fingerprint(exc.key)} instead of {fingerprint(exc.expected_key)}",
                host=name,
                hint="if the host was reinstalled, replace its line in"
                f" {_file_to_edit(where)} with: {where.address} {exc.key.get_name()}"
                f" {exc.key.get_base64()}",
            ) from exc
        except paramiko.AuthenticationException as exc:
            client.close()
            raise RemoteError(
                f"{name}: ssh login as {where.user}@{where.address} was refused",
                host=name,
                hint="set key_file in the inventory or add the key to the ssh agent",
            ) from exc
        except OSError as exc:
            client.close()
            # A timeout is not retried; a refused connection may be due to a restart of sshd.
            kind = RemoteError if isinstance(exc, TimeoutError) else _NoConnection
            error = kind(f"{name}: ssh to {where.address}:{where.port}: {_why(exc)}", host=name)
            error.silent = _silent(exc)
            raise error from exc
        # Paramiko's thread can fail with any exception on invalid data from the server.
        except Exception as exc:
            client.close()
            raise RemoteError(
                f"{name}: ssh to {where.address}: {last_line(str(exc), 'connection lost')}",
                host=name,
            ) from exc
        transport = client.get_transport()
        if transport is not None:  # an agent's order may take an hour without any message
            transport.set_keepalive(_KEEPALIVE)
        return client

    def _run(
        self, client: paramiko.SSHClient, args: Sequence[str], text: str, limit: Seconds
    ) -> Answer:
        name, what = self.host.name, args[0]
        try:
            line = command_line(args)
        except ValueError as exc:
            raise RemoteError(f"{name}: cannot run {' '.join(args)!a}: {exc}", host=name) from exc
        late = threading.Event()
        try:
            status, out, err = _talk(client, line, text, limit, late)
        except _TooMuch as exc:
            raise RemoteError(
                f"{name}: {what} printed more than {_MOST_OUTPUT >> 20} MiB",
                host=name,
                hint="make sure that logins on the host print nothing",
            ) from exc
        # Paramiko's thread can fail with any exception on invalid data from the server.
        except Exception as exc:
            if late.is_set() or isinstance(exc, TimeoutError):
                raise RemoteError(
                    f"{name}: {what}: no answer within {limit:g} s", host=name
                ) from exc
            reason = last_line(str(exc), type(exc).__name__)
            raise RemoteError(
                f"{name}: ssh connection lost during {what}: {reason}", host=name
            ) from exc
        if late.is_set():
            raise RemoteError(f"{name}: {what}: no answer within {limit:g} s", host=name)
        return Answer(
            status=status, out=out.decode(errors="replace"), err=err.decode(errors="replace")
        )


def _talk(
    client: paramiko.SSHClient, line: bytes, text: str, limit: Seconds, late: threading.Event
) -> tuple[int, bytes, bytes]:
    """Run a command line and return its exit status, output and errors.

    `late` is set if the command does not finish within `limit`.
    """
    transport = client.get_transport()
    if transport is None:
        raise EOFError("no connection")
    channel = transport.open_session(timeout=limit)
    with _ended(channel.close, limit, late), ThreadPoolExecutor(1, "ssh errors") as helper:
        try:
            channel.exec_command(line)
            channel.sendall(text.encode())
            channel.shutdown_write()
            errors = helper.submit(_drained, channel.recv_stderr, channel.close)
            out = _drained(channel.recv, channel.close)
            err = errors.result()
            return channel.recv_exit_status(), out, err
        finally:
            channel.close()


def _drained(read: Callable[[int], bytes], close: Callable[[], None]) -> bytes:
    """Read a stream to its end with `read`, which takes the maximum number of bytes.

    If the stream exceeds the limit, calls `close` to end it, and raises _TooMuch.
    """
    found = bytearray()
    while more := read(1 << 16):
        found += more
        if len(found) > _MOST_OUTPUT:
            close()  # also ends the thread that reads the other stream
            raise _TooMuch
    return bytes(found)


@contextmanager
def _ended(close: Callable[[], object], limit: float, late: threading.Event) -> Iterator[None]:
    """Set `late` and call `close` after `limit` seconds, which ends all waiting in the block."""

    def end() -> None:
        late.set()
        # A broken connection may fail to close.
        with suppress(OSError, EOFError, paramiko.SSHException):
            close()

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _entering(where: SshAddress) -> Iterator[socket.socket]:
    """Open a TCP connection, and shut it down if the login in the block takes too long."""
    line = socket.create_connection((where.address, where.port), timeout=CONNECT_LIMIT)
    # Otherwise, the second of two small messages waits until the host has acknowledged the first,
    # for up to 40 ms.
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    late = threading.Event()
    try:
        with _ended(lambda: line.shutdown(socket.SHUT_RDWR), _ENTER_LIMIT, late):
            yield line
    except BaseException as exc:
        line.close()
        if late.is_set():
            raise _LoginTooSlow from exc
        raise


class _LoginTooSlow(TimeoutError):
    """The login took too long, but the host accepted a connection, so it is not silent."""


class _NoConnection(RemoteError, OSError):
    """The connection could not be opened. Connecting is retried once."""


def _alive(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _know(keys: paramiko.HostKeys, path: Path) -> None:
    """Add the keys in a known_hosts file. Lines that paramiko cannot parse are skipped.

    Keys marked @revoked are never added. @cert-authority lines are for certificates, which paramiko
    does not verify.
    """
    try:
        with path.open(errors="replace") as file:
            lines = [line.strip() for line in file.read(_MOST_KNOWN_HOSTS).splitlines()]
    except OSError:
        return
    revoked = {line.split()[-1] for line in lines if line.startswith("@revoked")}
    for line in lines:
        if line and line[0] not in "#@" and not revoked & set(line.split()):
            with suppress(paramiko.SSHException, InvalidHostKey, ValueError):
                entry = HostKeyEntry.from_line(line)
                if entry is not None:
                    for name in entry.hostnames or []:
                        keys.add(name, entry.key.get_name(), entry.key)


def _usual_known_hosts() -> list[Path]:
    return [Path("~/.ssh/known_hosts").expanduser(), _SYSTEM_KNOWN_HOSTS]


def _silent(error: OSError) -> bool:
    """Return whether the host has not answered at all."""
    if isinstance(error, TimeoutError):
        return not isinstance(error, _LoginTooSlow)
    return error.errno in (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "unknown host name"
    if isinstance(error, _LoginTooSlow):
        return f"connected, but the login took more than {_ENTER_LIMIT:g} s"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_LIMIT:g} s"
    return error.strerror or str(error)


# Only connections of this guest's QEMU on libvirt's migration ports are closed, not its display or
# the streams of other guests.
_SCRIPT = r"""
pid=$(cat "/run/libvirt/qemu/$1.pid" 2>/dev/null) || exit 0
case $pid in "" | *[!0-9]*) exit 0 ;; esac
port() { sed -n "s/^ *migration_port_$1 *= *\([0-9]*\).*/\1/p" /etc/libvirt/qemu.conf 2>/dev/null; }
low=$(port min); high=$(port max)
ss -Htnp state established | grep "pid=$pid," | while read -r _ _ here there _; do
    own=${here##*:}
    if [ "$own" -ge "${low:-49152}" ] && [ "$own" -le "${high:-49215}" ]; then
        ss -K -t src "$here" dst "$there" >/dev/null && echo "$there"
    fi
done
"""


async def drop(remote: Remote, guest: str) -> int:
    """Close the incoming migration streams of a guest. Returns the number of closed streams.

    `guest`: the guest's name. Raises RemoteError.
    """
    if "/" in guest:
        raise RemoteError(f"{guest!r} is not a valid guest name")
    answer = await remote.run(["sh", "-s", "--", guest], text=_SCRIPT)
    if answer.status != 0:
        raise RemoteError(
            f"{remote.host.name}: cannot close the migration stream of {guest}:"
            f" {last_line(answer.err, f'status {answer.status}')}",
            host=remote.host.name,
        )
    return len(answer.out.split())
