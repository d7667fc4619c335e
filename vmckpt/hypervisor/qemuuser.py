"""As whom libvirt runs QEMU on a host, and folders where that user may make what we ask it for."""

import os
from pathlib import Path

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import library, parse


def owner(uri: str, host: str) -> tuple[int, int]:
    """User and group there. Raises HypervisorError."""
    with library.opened(uri, host) as connection:
        try:
            return owner_in(connection.getCapabilities())
        except libvirt.libvirtError as exc:
            raise library.refused(exc, host=host, what="asking as whom QEMU runs") from exc
        except ValueError as exc:
            raise HypervisorError(f"{host}: as whom QEMU runs: {exc}", host=host) from exc


def owner_in(capabilities: str) -> tuple[int, int]:
    """The same out of libvirt's capabilities; root if they do not say. Raises ValueError."""
    for model in parse.tree(capabilities, "capabilities").findall("host/secmodel"):
        if model.findtext("model") == "dac":
            for label in model.findall("baselabel"):
                user, _, group = (label.text or "").lstrip("+").partition(":+")
                return int(user), int(group)
    return 0, 0


def make_folder(place: Path, to: tuple[int, int]) -> Path:
    """A folder of our own on this machine where QEMU, which runs as `to`, may make its sockets.

    Fine if it is there. Raises OSError.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(place, *to)
    return place
