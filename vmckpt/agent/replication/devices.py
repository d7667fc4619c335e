"""Check whether a protected guest still has the same devices as its standby.

libvirt reports a device right after it was plugged in. A separate thread then immediately takes
down the link of a new network card. To find changes that no event reports, the agent also compares
the devices' names in each epoch, and all their properties every few seconds.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.lifecycle import Endings
from vmckpt.replication.primary.new_nics import NewCards
from vmckpt.util import atomic_file

log = logging.getLogger("vmckpt.replica")

_FILE = "devices"
_PERIPHERAL = "/machine/peripheral"
"""QOM path of all devices with an ID; libvirt gives every device an ID."""


class Devices:
    """The devices of one guest.

    Use as `with Devices(...) as devices`. Hotplug events are handled until the block is left.
    """

    def __init__(
        self, monitor: Commands, folder: Path, new_cards: NewCards, endings: Endings, *,
        known: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`known`: the guest's `device_facts` when the standby was defined. None: use the devices
        that the first agent finds. They are stored in `folder` for later agents."""
        self._monitor, self._file, self._new_cards = monitor, folder / _FILE, new_cards
        self._endings, self._known = endings, known
        self._names: frozenset[str] | None = None
        self._seen: frozenset[str] = frozenset()
        self._told = threading.Event()
        self._plugged: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def __enter__(self) -> Self:
        self._endings.on_device = self._take
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._endings.on_device = None
        self._plugged.put(None)
        self._thread.join()

    @property
    def told(self) -> bool:
        """Return whether libvirt has reported a change since the last full comparison."""
        return self._told.is_set()

    @property
    def gone(self) -> frozenset[str]:
        """Return the names of devices that the guest no longer had at the last comparison."""
        return (self._names or frozenset()) - self._seen

    def same(self) -> bool:
        """Compare the devices completely, and take down the links of new network cards.

        Returns whether the standby has the same devices. Raises HypervisorError, OSError.
        """
        self._endings.keep()
        self._told.clear()
        now = device_facts(self._monitor)
        if self._known is None:
            self._known = self._first(now)
        self._names, self._seen = frozenset(self._known["names"]), frozenset(now["names"])
        self._cut(self._seen - self._names)
        return bool(self._known["digest"] == now["digest"] and self._seen == self._names)

    def _first(self, now: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return dict(json.loads(self._file.read_text()))
        except FileNotFoundError:
            atomic_file.put(self._file, json.dumps(now))
            return now

    def still(self) -> bool:
        """Compare only the devices' names, with one query. Takes down the links of new cards.

        Returns whether the standby has the same devices. Raises HypervisorError, OSError.
        """
        if self._names is None:
            return self.same()
        self._seen = names = _names(self._monitor)
        self._cut(names - self._names)
        return names == self._names

    def _cut(self, devices: Iterable[str]) -> None:
        for device in devices:
            self._new_cards.cut(device)

    def _take(self, device: str, plugged: bool) -> None:
        """Handle an event. Runs in libvirt's event thread, which must not wait for QEMU."""
        self._told.set()
        if plugged:
            self._plugged.put(device)

    def _run(self) -> None:
        while (device := self._plugged.get()) is not None:
            try:
                self._new_cards.cut(device)
            except (HypervisorError, OSError) as exc:  # the next comparison tries again
                log.warning("taking down the link of %s failed: %s", device, exc)


def device_facts(monitor: Commands) -> dict[str, Any]:
    """Return the guest's devices: their `names`, and a `digest` of what a standby must match.

    Raises HypervisorError.
    """
    return {"names": sorted(_names(monitor)), "digest": _digest(monitor)}


def _names(monitor: Commands) -> frozenset[str]:
    told = monitor.ask("qom-list", path=_PERIPHERAL)
    return frozenset(one["name"] for one in told if one["type"].startswith("child<"))


def _digest(monitor: Commands) -> str:
    """Return a digest of the guest's devices, disks and memory sizes."""
    buses = [
        sorted(
            f"{one['bus']}.{one['slot']}.{one['function']} {one['id']}" for one in bus["devices"]
        )
        for bus in monitor.ask("query-pci")
    ]
    disks = sorted(str(one.get("qdev") or one["device"]) for one in monitor.ask("query-block"))
    memory = monitor.ask("query-memory-size-summary")
    told = json.dumps([buses, disks, memory], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()
