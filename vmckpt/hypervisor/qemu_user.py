"""As whom libvirt runs QEMU on a host, and folders where that user may make what we ask it for."""

import os
import stat
import subprocess
from pathlib import Path

import libvirt

from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import connection as hypervisor_connection
from vmckpt.hypervisor import domain_xml


def owner(uri: str, host: str) -> tuple[int, int]:
    """User and group there. Raises HypervisorError."""
    with hypervisor_connection.opened(uri, host) as connection:
        try:
            return owner_in(connection.getCapabilities())
        except libvirt.libvirtError as exc:
            raise hypervisor_connection.map_refusal(
                exc, host=host, what="asking as whom QEMU runs"
            ) from exc
        except ValueError as exc:
            raise HypervisorError(f"{host}: as whom QEMU runs: {exc}", host=host) from exc


def owner_in(capabilities: str) -> tuple[int, int]:
    """The same out of libvirt's capabilities; root if they do not say. Raises ValueError."""
    for model in domain_xml.tree(capabilities, "capabilities").findall("host/secmodel"):
        if model.findtext("model") == "dac":
            for label in model.findall("baselabel"):
                user, _, group = (label.text or "").lstrip("+").partition(":+")
                return int(user), int(group)
    return 0, 0


def make_folder(place: Path, to: tuple[int, int]) -> Path:
    """A folder of our own on this machine where QEMU, which runs as `to`, may make its sockets.

    Fine if it is there. Raises OSError, and BadInput if QEMU may not go there.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(place, *to)
    if to[0] and not _may_enter(place, to):
        shut = [one for one in place.parents if not one.stat().st_mode & stat.S_IXOTH]
        raise BadInput(
            f"QEMU, which runs as {to[0]}, may not go to {place}",
            hint=f"run chmod o+x {shut[-1] if shut else place.parent} there",
        )
    return place


def _may_enter(place: Path, to: tuple[int, int]) -> bool:
    """As far as it can be tried."""
    words = ["setpriv", "--reuid", str(to[0]), "--regid", str(to[1]), "--init-groups"]
    try:
        done = subprocess.run([*words, "test", "-x", place], capture_output=True, check=False)
    except OSError:
        return True
    return done.returncode != 1 or bool(done.stderr)
