"""Commands on a host over ssh, with the host's key verified always.

An unknown or changed key is refused with the line that would have to be added; it is never added
by itself. Connecting is retried, since that changes nothing; a command never is.
"""

import asyncio
import base64
import hashlib
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from vmckpt.errors import HostKeyRefused, RemoteError
from vmckpt.model.hosts import Host, SshAddress
from vmckpt.units import Seconds

CONNECT_LIMIT = 8.0
COMMAND_LIMIT = Seconds(20.0)
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command on a host gave."""

    status: int
    out: str
    err: str


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Unknown keys are refused with what the operator needs to decide."""

    def __init__(self, where: SshAddress) -> None:
        self._where = where

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        raise HostKeyRefused(
            f"{hostname}: ssh key {fingerprint(key)} is not known",
            mend=f"check it at the host, then add to {_file_to_edit(self._where)} the line:"
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
                f"{host.name}: no ssh address", mend="add ssh: {address: ...} to the inventory"
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
        async with self._opening:
            if self._client is None or not _alive(self._client):
                self._client = await asyncio.to_thread(self._connect)
        return await asyncio.to_thread(self._run, self._client, args, text, limit)

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
            client.connect(
                where.address,
                where.port,
                where.user,
                key_filename=str(where.key_file) if where.key_file else None,
                look_for_keys=where.key_file is None,
                timeout=CONNECT_LIMIT,
                banner_timeout=CONNECT_LIMIT,
                auth_timeout=CONNECT_LIMIT,
            )
        except HostKeyRefused:
            client.close()
            raise
        except paramiko.BadHostKeyException as exc:
            client.close()
            raise HostKeyRefused(
                f"{name}: ssh key of {where.address} has changed: {fingerprint(exc.key)}, known is"
                f" {fingerprint(exc.expected_key)}",
                mend="if the host was reinstalled, replace its line in"
                f" {_file_to_edit(where)} by: {where.address} {exc.key.get_name()}"
                f" {exc.key.get_base64()}",
            ) from exc
        except paramiko.AuthenticationException as exc:
            client.close()
            raise RemoteError(
                f"{name}: ssh login as {where.user}@{where.address} was refused",
                mend="set key_file in the inventory or add the key to the agent",
            ) from exc
        except (paramiko.SSHException, EOFError, UnicodeError) as exc:
            client.close()
            raise RemoteError(f"{name}: ssh to {where.address}: {exc}") from exc
        except OSError as exc:
            client.close()
            # Silence has used up the time already; a refusal may be a daemon that restarts.
            kind = RemoteError if isinstance(exc, TimeoutError) else _NoConnection
            raise kind(f"{name}: ssh to {where.address}:{where.port}: {_why(exc)}") from exc
        return client

    def _run(
        self, client: paramiko.SSHClient, args: Sequence[str], text: str, limit: Seconds
    ) -> Answer:
        what = args[0]
        try:
            stdin, stdout, stderr = client.exec_command(shlex.join(args), timeout=limit)
            stdin.write(text)
            stdin.channel.shutdown_write()
            out, err = stdout.read(), stderr.read()
            status = stdout.channel.recv_exit_status()
        except TimeoutError as exc:
            raise RemoteError(f"{self.host.name}: {what} gave no answer in {limit:g} s") from exc
        except (paramiko.SSHException, OSError, EOFError) as exc:
            raise RemoteError(f"{self.host.name}: ssh broke during {what}: {exc}") from exc
        return Answer(
            status=status, out=out.decode(errors="replace"), err=err.decode(errors="replace")
        )


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
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return
    revoked = {line.split()[-1] for line in lines if line.startswith("@revoked")}
    for line in lines:
        if line and line[0] not in "#@" and not revoked & set(line.split()):
            with suppress(paramiko.SSHException, InvalidHostKey):
                entry = HostKeyEntry.from_line(line)
                if entry is not None:
                    for name in entry.hostnames or []:
                        keys.add(name, entry.key.get_name(), entry.key)


def _usual_known_hosts() -> list[Path]:
    return [Path("~/.ssh/known_hosts").expanduser(), _SYSTEM_KNOWN_HOSTS]


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    if isinstance(error, TimeoutError):
        return f"no answer in {CONNECT_LIMIT:g} s"
    nested = getattr(error, "errors", None)
    if isinstance(nested, dict) and nested:  # paramiko's NoValidConnectionsError
        return _why(next(iter(nested.values())))
    return error.strerror or str(error)
