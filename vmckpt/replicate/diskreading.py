"""The disks of a running guest, read as they are: its own QEMU serves them to us, for a while.

QEMU has one NBD server. That it is ours is said by the socket in a folder of our own, so that
whoever comes after an agent that died can take it away, and nobody else's.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vmckpt.capture.migration_settings import Commands
from vmckpt.capture.nbd.client import Client
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.hypervisor import qemu_user
from vmckpt.hypervisor.qmp import Refused
from vmckpt.replicate.link import Cut

_SOCKET = "disks.sock"
_EXPORT = "vmckpt-read-"


def place_of(folder: Path) -> Path:
    """Where the socket of a guest's disks is, of which `folder` has all files."""
    return folder / "read"


@contextmanager
def opened(
    monitor: Commands, nodes: Sequence[str], place: Path, owner: tuple[int, int]
) -> Iterator[list[Client]]:
    """Read these nodes, in that order; QEMU runs as `owner`.

    Raises Cut if somebody else reads the guest's disks so just now, and HypervisorError.
    """
    end(monitor, place)
    qemu_user.make_folder(place, owner)
    socket = place / _SOCKET
    try:
        address = {"type": "unix", "data": {"path": str(socket)}}
        try:
            monitor.tell("nbd-server-start", {"addr": address})
        except Refused as exc:
            raise Cut(f"{monitor.name}'s disks cannot be read: {exc.message}") from exc
        with ExitStack() as stack:
            clients = []
            for number, node in enumerate(nodes):
                name = f"{_EXPORT}{number}"
                told: dict[str, object] = {"type": "nbd", "id": name, "name": name}
                monitor.tell("block-export-add", told | {"node-name": node, "writable": False})
                client = Client(Unix(str(socket)), name, host=monitor.host)
                clients.append(stack.enter_context(client))
            yield clients
    finally:
        end(monitor, place)


def end(monitor: Commands, place: Path) -> None:
    """Nobody reads them any more; fine if nobody did. Raises HypervisorError."""
    if (place / _SOCKET).exists():
        with suppress(Refused):  # it is gone already
            monitor.tell("nbd-server-stop", {})
    shutil.rmtree(place, ignore_errors=True)
