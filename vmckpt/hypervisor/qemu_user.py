"""The user and group of libvirt's QEMU processes, and directories that QEMU may write to."""

import os
import stat
import subprocess
from pathlib import Path
from shlex import quote

import libvirt

from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import connection as hypervisor_connection
from vmckpt.hypervisor import domain_xml


def owner(uri: str, host: str) -> tuple[int, int]:
    """Return the user and group IDs of QEMU on the host. Raises HypervisorError.

    `host` is for messages.
    """
    with hypervisor_connection.opened(uri, host) as connection:
        try:
            return owner_in(connection.getCapabilities())
        except libvirt.libvirtError as exc:
            raise hypervisor_connection.map_refusal(
                exc, host=host, what="reading QEMU's user"
            ) from exc
        except ValueError as exc:
            raise HypervisorError(f"{host}: reading QEMU's user: {exc}", host=host) from exc


def owner_in(capabilities: str) -> tuple[int, int]:
    """Return QEMU's user and group IDs from libvirt's capabilities; (0, 0) if they name none.

    Raises ValueError.
    """
    for model in domain_xml.tree(capabilities, "capabilities").findall("host/secmodel"):
        if model.findtext("model") == "dac":
            for label in model.findall("baselabel"):
                user, _, group = (label.text or "").lstrip("+").partition(":+")
                return int(user), int(group)
    return 0, 0


def make_folder(place: Path, to: tuple[int, int]) -> Path:
    """Create the directory `place`, unless it exists, and make QEMU its owner.

    QEMU can then create sockets in the directory. `to`: QEMU's user and group IDs. Returns `place`.
    Raises OSError, and BadInput if QEMU has no access to the directory.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(place, *to)
    if to[0] and not _may_enter(place, to):
        shut = [one for one in place.parents if not one.stat().st_mode & stat.S_IXOTH]
        raise BadInput(
            f"{place}: QEMU, which runs as user {to[0]}, has no access to this directory",
            hint=f"run chmod o+x {quote(str(shut[-1] if shut else place.parent))} on that host",
        )
    return place


def _may_enter(place: Path, to: tuple[int, int]) -> bool:
    """Return whether the user may enter a directory; True if this cannot be tested.

    `to`: user and group ID.
    """
    words = ["setpriv", "--reuid", str(to[0]), "--regid", str(to[1]), "--init-groups"]
    try:
        done = subprocess.run([*words, "test", "-x", place], capture_output=True, check=False)
    except OSError:
        return True
    return done.returncode != 1 or bool(done.stderr)
