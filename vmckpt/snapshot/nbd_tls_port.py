"""Serve disks on a loopback port to clients that have a key: NBD over TLS.

Every user of a machine can connect to its ports, including ports that ssh forwards. So each client
needs a key (TLS-PSK) from a private directory of the user. qemu-storage-daemon checks the key, and
reads the disks from vmckpt's NBD server through a socket in that directory. The key never appears
on the command line of the server or of a client.
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
"""The default TLS-PSK user name of QEMU and libnbd clients."""
_KEYS = "keys.psk"
_PACKAGES = {"qemu-storage-daemon": "qemu-system-common", "setpriv": "util-linux"}
_WITHIN = Seconds(20.0)


@contextmanager
def own_directory() -> Iterator[Path]:
    """Make a directory that no other user can enter, and remove it afterwards.

    The new directory is in the user's runtime directory if that is private, else in the directory
    for temporary files. Raises OSError.
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
    """A port on which exports are served; see `served`."""

    def __init__(self, place: Tcp, folder: Path, daemon: "subprocess.Popen[str]") -> None:
        self.place = place
        self.key_directory = folder
        """Where QEMU clients look for the key: dir= of tls-creds-psk."""
        self._daemon = daemon

    def uri(self, export: str) -> str:
        """Return the URI of an export, for libnbd clients."""
        key = quote(str(self.key_directory / _KEYS))
        return f"nbds://{USER}@{self.place}/{quote(export, safe='')}?tls-psk-file={key}"

    def qemu_options(self, export: str) -> str:
        """Return the options that select an export, for QEMU tools such as qemu-img."""
        key = f"tls-creds-psk,id=key,endpoint=client,dir={_escaped(str(self.key_directory))}"
        server = f"server.type=inet,server.host={self.place.host},server.port={self.place.port}"
        image = f"driver=nbd,{server},export={_escaped(export)},tls-creds=key"
        return f"--object {key} --image-opts {image}"

    def must_live(self) -> None:
        """Check that the port is still served. Raises VmckptError."""
        if self._daemon.poll() is not None:
            raise VmckptError(f"{self.place} is no longer served: {_said(self._daemon)}")


@contextmanager
def served(exports: Mapping[str, Export], place: Tcp) -> Iterator[Port]:
    """Serve exports at a loopback address, read-only; port 0 chooses a free port.

    Raises BadInput if the address is not a loopback address or cannot be served, or if a required
    tool is not installed, and OSError.
    """
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            raise BadInput(f"{program} is not installed on this machine", hint=f"install {package}")
    with own_directory() as folder, _bound(place) as listener:
        _write_key(folder)
        at = Unix(str(folder / "nbd"))
        place = Tcp(place.host, listener.getsockname()[1])
        with Server(exports, at), _daemon(list(exports), folder, listener) as daemon:
            _wait(daemon, folder / "pid", place)
            yield Port(place, folder, daemon)


def _write_key(folder: Path) -> None:
    """Write a 256-bit key that only this user can read."""
    made = os.open(folder / _KEYS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(made, "w") as file:
        file.write(f"{USER}:{secrets.token_hex(32)}\n")


@contextmanager
def _bound(place: Tcp) -> Iterator[socket.socket]:
    """Bind a socket to an address, without listening. Raises BadInput."""
    with socket.socket(_loopback(place)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((place.host, place.port))
        except OSError as exc:
            raise BadInput(f"cannot listen on {place}: {exc.strerror or exc}") from exc
        yield made


def _loopback(place: Tcp) -> socket.AddressFamily:
    """Return the address family of a loopback address. Raises BadInput for other addresses.

    Clients need the key, which is in a file on this machine that only this user can read.
    """
    try:
        address = ipaddress.ip_address(place.host)
    except ValueError as exc:
        raise BadInput(
            f"{place}: the host is not an IP address", hint="use 127.0.0.1, for example"
        ) from exc
    if not address.is_loopback:
        raise BadInput(
            f"{place} is not a loopback address: other machines could read the disk",
            hint="use 127.0.0.1 and forward the port with ssh",
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
    # If this process is killed, the daemon is terminated, too.
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *words], pass_fds=(listener.fileno(),),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # Ctrl-C is for this process only
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
    """Wait for the daemon's pidfile, which it writes once it is listening. Raises BadInput."""
    give_up = time.monotonic() + _WITHIN
    while not pidfile.exists():
        if daemon.poll() is not None or time.monotonic() > give_up:
            daemon.kill()
            raise BadInput(f"cannot serve on {place}: {_said(daemon)}")
        time.sleep(0.02)


def _said(daemon: "subprocess.Popen[str]") -> str:
    lines = (daemon.communicate()[1] or "").strip().splitlines()
    return lines[-1] if lines else f"qemu-storage-daemon exited with status {daemon.returncode}"


def _escaped(text: str) -> str:
    """Escape the value of a QEMU option: commas are doubled."""
    return text.replace(",", ",,")
