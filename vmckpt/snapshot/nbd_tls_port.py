"""Disks on a loopback port, for programs that have a key: NBD over TLS.

Every user of a machine can connect to its ports, also to those that ssh forwards. So each client is
asked for a key (TLS-PSK) that lies in a directory of the user's own. qemu-storage-daemon does that,
and takes the content from our server on a socket in there. No key is on a command line, neither
the server's nor a client's.
"""

import ipaddress
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vmckpt.capture.nbd.protocol import Tcp, Unix
from vmckpt.capture.nbd.server import MOST_CLIENTS, Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, VmckptError
from vmckpt.units import Seconds

USER = "qemu"
"""As whom clients of QEMU and libnbd log in if nothing is said."""
_KEYS = "keys.psk"
_PACKAGES = {"qemu-storage-daemon": "qemu-system-common", "setpriv": "util-linux"}
_WITHIN = Seconds(20.0)


@contextmanager
def own_directory() -> Iterator[Path]:
    """Make a directory that no other user can enter, and remove it afterwards.

    It is in the user's runtime directory if that is the user's alone, else where temporary files
    are. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="vmckpt-", dir=_runtime_directory()) as made:
        yield Path(made)


def _runtime_directory() -> Path | None:
    path = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with suppress(OSError):
        seen = path.lstat()
        ours = seen.st_uid == os.geteuid() and not seen.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if path.is_absolute() and stat.S_ISDIR(seen.st_mode) and ours:
            return path
    return None


class Port:
    """A port at which exports are served; see `served`."""

    def __init__(self, place: Tcp, folder: Path, daemon: "subprocess.Popen[str]") -> None:
        self.place = place
        self.key_directory = folder
        """Where clients of QEMU look for the key: tls-creds-psk's dir=."""
        self._daemon = daemon

    def uri(self, export: str) -> str:
        """How programs of libnbd name an export."""
        key = quote(str(self.key_directory / _KEYS))
        return f"nbds://{USER}@{self.place}/{quote(export, safe='')}?tls-psk-file={key}"

    def qemu_options(self, export: str) -> str:
        """How programs of QEMU name an export, after their own name and command."""
        key = f"tls-creds-psk,id=key,endpoint=client,dir={_escaped(str(self.key_directory))}"
        server = f"server.type=inet,server.host={self.place.host},server.port={self.place.port}"
        image = f"driver=nbd,{server},export={_escaped(export)},tls-creds=key"
        return f"--object {key} --image-opts {image}"

    def must_live(self) -> None:
        """Raises VmckptError if it serves no more."""
        if self._daemon.poll() is not None:
            raise VmckptError(f"nothing is served at {self.place} any more: {_said(self._daemon)}")


@contextmanager
def served(exports: Mapping[str, Export], place: Tcp) -> Iterator[Port]:
    """Serve exports at a loopback address, read-only; port 0 is any that is free.

    Raises BadInput if nothing can listen there, or a program is missing.
    """
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            raise BadInput(f"{program} is not installed here", hint=f"install {package}")
    with own_directory() as folder, _bound(place) as listener:
        _write_key(folder)
        at = Unix(str(folder / "nbd"))
        place = Tcp(place.host, listener.getsockname()[1])
        with Server(exports, at), _daemon(list(exports), folder, listener) as daemon:
            _wait(daemon, folder / "pid", place)
            yield Port(place, folder, daemon)


def _write_key(folder: Path) -> None:
    """A key of 256 bits, for us alone."""
    made = os.open(folder / _KEYS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(made, "w") as file:
        file.write(f"{USER}:{secrets.token_hex(32)}\n")


@contextmanager
def _bound(place: Tcp) -> Iterator[socket.socket]:
    """A socket that is at an address, and does not listen yet."""
    with socket.socket(_loopback(place)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((place.host, place.port))
        except OSError as exc:
            raise BadInput(f"{place}: cannot listen there: {exc.strerror or exc}") from exc
        yield made


def _loopback(place: Tcp) -> socket.AddressFamily:
    """Only this machine: the key is here, and its other users are kept out by it."""
    try:
        address = ipaddress.ip_address(place.host)
    except ValueError as exc:
        raise BadInput(f"{place}: give an address, such as 127.0.0.1") from exc
    if not address.is_loopback:
        raise BadInput(
            f"{place}: other machines could read the disk",
            hint="use 127.0.0.1 and let ssh forward the port",
        )
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET


@contextmanager
def _daemon(
    names: Sequence[str], folder: Path, listener: socket.socket
) -> Iterator["subprocess.Popen[str]"]:
    key = {"qom-type": "tls-creds-psk", "id": "key", "endpoint": "server", "dir": str(folder)}
    address = {"type": "fd", "str": str(listener.fileno())}
    server = {"addr": address, "tls-creds": "key", "max-connections": MOST_CLIENTS}
    words = ["qemu-storage-daemon", "--pidfile", str(folder / "pid"), *_option("object", key)]
    source = {"type": "unix", "path": str(folder / "nbd")}
    for number, name in enumerate(names):
        node = {"driver": "nbd", "node-name": f"disk{number}", "server": source, "export": name}
        words += _option("blockdev", {**node, "read-only": True})
    words += _option("nbd-server", server)
    for number, name in enumerate(names):
        node = {"type": "nbd", "id": f"export{number}", "node-name": f"disk{number}", "name": name}
        words += _option("export", {**node, "writable": False})
    # If we are killed it goes, too.
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *words], pass_fds=(listener.fileno(),),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # Ctrl-C is for us
    ) as daemon:  # fmt: skip
        try:
            yield daemon
        finally:
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(_WITHIN)
            daemon.kill()


def _option(name: str, value: Mapping[str, Any]) -> tuple[str, str]:
    return f"--{name}", json.dumps(value)


def _wait(daemon: "subprocess.Popen[str]", pidfile: Path, place: Tcp) -> None:
    """It writes its pidfile once it listens."""
    give_up = time.monotonic() + _WITHIN
    while not pidfile.exists():
        if daemon.poll() is not None or time.monotonic() > give_up:
            daemon.kill()
            raise BadInput(f"{place}: cannot be served: {_said(daemon)}")
        time.sleep(0.02)


def _said(daemon: "subprocess.Popen[str]") -> str:
    lines = (daemon.communicate()[1] or "").strip().splitlines()
    return lines[-1] if lines else f"qemu-storage-daemon ended with {daemon.returncode}"


def _escaped(text: str) -> str:
    """A comma in the value of one of QEMU's options is written twice."""
    return text.replace(",", ",,")
