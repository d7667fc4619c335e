"""Network cards that are plugged in while a standby may take over.

No filter buffers the output of these cards, and filters do not work with vhost. So their links are
kept down, and QEMU discards their packets, until the standby is invalid. Then the links are brought
up. A file lists the cards, so that their links are restored even if the agent dies.
"""

import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from vmckpt.capture import migration_settings
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.util import atomic_file

log = logging.getLogger("vmckpt.replica")

_FILE = "cut-cards"


class Commands(migration_settings.Commands, Protocol):
    """The part of `hypervisor.qmp.QmpMonitor` that this module uses."""

    def described(self) -> str: ...


class NewCards:
    """The new network cards of one guest. Safe to use from several threads."""

    def __init__(self, monitor: Commands, folder: Path) -> None:
        """`folder`: the protection's directory."""
        self._monitor, self._folder = monitor, folder
        self._lock = threading.Lock()
        self._holds = False

    def hold(self) -> None:
        """Record that output is buffered from now on: `cut` then takes down links of new cards."""
        with self._lock:
            self._holds = True

    def cut(self, device: str) -> None:
        """Take down the link of a new device while output is buffered.

        Does nothing if the device has no link. Raises HypervisorError, OSError.
        """
        with self._lock:
            if not self._holds:
                return
            cut = _cut(self._folder)
            _note(self._folder, [*(one for one in cut if one != device), device])
            try:
                _set_link(self._monitor, device, up=False)
            except QmpRefused:  # the device is not a network card
                _note(self._folder, cut)
            else:
                log.warning("%s was plugged in: its link stays down until the standby is invalid",
                            device)  # fmt: skip

    def connect(self) -> None:
        """Bring up the links of new cards. The standby must be invalid.

        Raises HypervisorError, OSError.
        """
        with self._lock:
            self._holds = False
            connect(self._monitor, self._folder)


def connect(monitor: Commands, folder: Path) -> None:
    """Bring up the links of all cards in the file, except those that are down in libvirt.

    May be repeated. Raises HypervisorError, OSError.
    """
    cut = _cut(folder)
    if not cut:
        return
    stay = _down(monitor.described())
    for device in cut:
        if device not in stay:
            with suppress(QmpRefused):  # the card was unplugged meanwhile
                _set_link(monitor, device, up=True)
    _note(folder, [])


def _set_link(monitor: Commands, device: str, *, up: bool) -> None:
    monitor.tell("set_link", {"name": device, "up": up})


def _down(xml: str) -> set[str]:
    """Return the aliases of the cards whose link is down in the guest's XML."""
    found = domain_xml.tree(xml, "domain").findall("devices/interface")
    down = [one.find("alias") for one in found if one.find("link[@state='down']") is not None]
    return {alias.get("name", "") for alias in down if alias is not None}


def _cut(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return (folder / _FILE).read_text().splitlines()
    return []


def _note(folder: Path, devices: list[str]) -> None:
    if devices:
        atomic_file.put(folder / _FILE, "\n".join(devices))
    else:
        (folder / _FILE).unlink(missing_ok=True)
