"""Commands on a host over ssh; the host's key is always verified.

An unknown or changed key is refused with the line that would have to be added; it is never added
automatically. Connecting is retried, since that changes nothing; a command never is.

The target's end of a migration stream that has died is closed from here, too. QEMU there waits for
pages and cannot know that nothing sends any more: TCP tells it nothing. It lets go only when its
socket is closed, and libvirt cannot ask it to while it waits.
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
from vmckpt.model.host import Host, SshAddress
from vmckpt.units import Seconds

_KEEPALIVE = 30
"""Seconds: firewalls forget a connection that is silent for some minutes."""
CONNECT_LIMIT = 8.0
COMMAND_LIMIT = Seconds(20.0)
# For all of it: a server that sends a byte now and then never uses up the limits of the steps.
_ENTER_LIMIT = 3 * CONNECT_LIMIT
_MOST_OUTPUT = 8 << 20
_MOST_KNOWN_HOSTS = 16 << 20
_LONGEST_WORDS = 200
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command on a host gave."""

    status: int
    out: str
    err: str


def command_line(args: Sequence[str]) -> bytes:
    """The line that the shell of a host's ssh server takes apart into just these arguments again.

    All that runs on hosts comes through here. Raises ValueError if no line can carry an argument.
    """
    line = shlex.join(args).encode("utf-8", "surrogateescape")
    if b"\0" in line:
        raise ValueError("a zero byte")
    return line


def last_line(text: str, otherwise: str) -> str:
    """The last line that a command said, for people; `otherwise` if it said nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_WORDS] if lines else otherwise


class _TooMuch(Exception):
    """The output has no end."""


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Unknown keys are refused with what the operator needs to decide."""

    def __init__(self, where: SshAddress) -> None:
        self._where = where

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        raise HostKeyRefused(
            f"{hostname}: ssh key {fingerprint(key)} is not known",
            hint=f"check it at the host, then add to {_file_to_edit(self._where)} the line:"
            f" {hostname} {key.get_name()} {key.get_base64()}",
        )


def fingerprint(key: paramiko.PKey) -> str:
    """As `ssh-keygen -l` prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


def _file_to_edit(where: SshAddress) -> Path:
    return where.known_hosts or Path("~/.ssh/known_hosts").expanduser()


class Remote:
    """One host over ssh. The connection is opened at the first command and kept."""

    def __init__(self, host: Host) -> None:
        if host.ssh is None:
            raise RemoteError(
                f"{host.name}: no ssh address", hint="add ssh: {address: ...} to the inventory"
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

    async def run(
        self, args: Sequence[str], *, text: str = "", limit: Seconds = COMMAND_LIMIT
    ) -> Answer:
        """Run one command with `text` as its input; any exit status is an answer.

        Raises RemoteError if there is no connection or no end within `limit`.
        """
        client = await self._connected()
        return await asyncio.to_thread(self._run, client, args, text, limit)

    async def channel(self, args: Sequence[str]) -> paramiko.Channel:
        """Start a command and leave its streams open. Raises RemoteError."""
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
        # Paramiko hands on whatever its thread met in what the server sent.
        except Exception as exc:
            reason = last_line(str(exc), type(exc).__name__)
            raise RemoteError(f"{self.host.name}: {args[0]} was not started: {reason}") from exc
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
        except HostKeyRefused:
            client.close()
            raise
        except paramiko.BadHostKeyException as exc:
            client.close()
            raise HostKeyRefused(
                f"{name}: ssh key of {where.address} has changed: {fingerprint(exc.key)}, known is"
                f" {fingerprint(exc.expected_key)}",
                hint="if the host was reinstalled, replace its line in"
                f" {_file_to_edit(where)} by: {where.address} {exc.key.get_name()}"
                f" {exc.key.get_base64()}",
            ) from exc
        except paramiko.AuthenticationException as exc:
            client.close()
            raise RemoteError(
                f"{name}: ssh login as {where.user}@{where.address} was refused",
                hint="set key_file in the inventory or add the key to the agent",
            ) from exc
        except OSError as exc:
            client.close()
            # Silence has used up the time already; a refusal may be a daemon that restarts.
            kind = RemoteError if isinstance(exc, TimeoutError) else _NoConnection
            error = kind(f"{name}: ssh to {where.address}:{where.port}: {_why(exc)}")
            error.silent = _silent(exc)
            raise error from exc
        # Paramiko hands on whatever its thread met in what the server sent.
        except Exception as exc:
            client.close()
            raise RemoteError(
                f"{name}: ssh to {where.address}: {last_line(str(exc), 'it broke')}"
            ) from exc
        transport = client.get_transport()
        if transport is not None:  # an order may take an hour in which nothing is said
            transport.set_keepalive(_KEEPALIVE)
        return client

    def _run(
        self, client: paramiko.SSHClient, args: Sequence[str], text: str, limit: Seconds
    ) -> Answer:
        name, what = self.host.name, args[0]
        try:
            line = command_line(args)
        except ValueError as exc:
            raise RemoteError(f"{name}: {what} cannot be told {' '.join(args)!a}: {exc}") from exc
        late = threading.Event()
        try:
            status, out, err = _talk(client, line, text, limit, late)
        except _TooMuch as exc:
            raise RemoteError(
                f"{name}: {what} answered with more than {_MOST_OUTPUT >> 20} MiB",
                hint="see that logins there print nothing",
            ) from exc
        # Paramiko hands on whatever its thread met in what the server sent.
        except Exception as exc:
            if late.is_set() or isinstance(exc, TimeoutError):
                raise RemoteError(f"{name}: {what} gave no answer in {limit:g} s") from exc
            reason = last_line(str(exc), type(exc).__name__)
            raise RemoteError(f"{name}: ssh broke during {what}: {reason}") from exc
        if late.is_set():
            raise RemoteError(f"{name}: {what} gave no answer in {limit:g} s")
        return Answer(
            status=status, out=out.decode(errors="replace"), err=err.decode(errors="replace")
        )


def _talk(
    client: paramiko.SSHClient, line: bytes, text: str, limit: Seconds, late: threading.Event
) -> tuple[int, bytes, bytes]:
    """Run a command line to its end: status, output, errors. `late` is set if that is too late."""
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
    """All that comes; _TooMuch if that has no end."""
    found = bytearray()
    while more := read(1 << 16):
        found += more
        if len(found) > _MOST_OUTPUT:
            close()  # whoever reads the other stream need not wait either
            raise _TooMuch
    return bytes(found)


@contextmanager
def _ended(close: Callable[[], object], limit: float, late: threading.Event) -> Iterator[None]:
    """Close what is waited for when the time is up: that ends every wait, whatever for."""

    def end() -> None:
        late.set()
        # What is broken already need not be closed.
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
    """A TCP connection, which is cut if the login takes too long in all."""
    line = socket.create_connection((where.address, where.port), timeout=CONNECT_LIMIT)

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
    """There was a connection, so something lives there."""


class _NoConnection(RemoteError, OSError):
    """No connection at all; worth one more try."""


def _alive(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _know(keys: paramiko.HostKeys, path: Path) -> None:
    """Add what a known_hosts file says; lines that paramiko cannot read are passed over.

    Keys marked @revoked are never known. @cert-authority lines are for certificates, which paramiko
    does not check.
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
    """Whether nothing at all has answered."""
    if isinstance(error, TimeoutError):
        return not isinstance(error, _LoginTooSlow)
    return error.errno in (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    if isinstance(error, TimeoutError):
        return f"no answer in {CONNECT_LIMIT:g} s"
    return error.strerror or str(error)


# Only connections of this guest's QEMU on libvirt's migration ports: its display and other guests'
# streams are not ours to close.
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
    """Close the streams that come in for a guest; how many there were. Raises RemoteError."""
    if "/" in guest:
        raise RemoteError(f"{guest!r}: no guest can be called so")
    answer = await remote.run(["sh", "-s", "--", guest], text=_SCRIPT)
    if answer.status != 0:
        raise RemoteError(
            f"{remote.host.name}: the stream of {guest} could not be closed:"
            f" {last_line(answer.err, f'status {answer.status}')}"
        )
    return len(answer.out.split())
