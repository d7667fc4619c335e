"""Check whether a protected guest still has the same devices as its standby.

libvirt reports a device right after it was plugged in. A separate thread then immediately takes
down the link of a new network card. To find changes that no event reports, the agent also compares
the devices' names in each epoch, and all their properties every few seconds.

If only DIMMs were plugged in, the standby can get the same DIMMs.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.lifecycle import Endings
from vmckpt.replication.primary.new_nics import NewCards
from vmckpt.replication.protocol.memory_layout import Dimm
from vmckpt.util import atomic_file

log = logging.getLogger("vmckpt.replica")

_FILE = "devices"
_PLUGGED = "plugged-memory"
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
        that the first agent finds. These devices are stored in `folder` for later agents, as are
        the devices that the standby gets later. Raises OSError, ValueError."""
        self._monitor, self._file, self._new_cards = monitor, folder / _FILE, new_cards
        self._endings = endings
        self._known = dict(json.loads(self._file.read_text())) if self._file.exists() else known
        self._now: Mapping[str, Any] = {}
        self._dimms: tuple[Dimm, ...] = ()
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
        """Return whether libvirt has reported a change since the last complete comparison."""
        return self._told.is_set()

    @property
    def gone(self) -> frozenset[str]:
        """Return the names of devices that the guest no longer had at the last comparison."""
        return (self._names or frozenset()) - self._seen

    @property
    def dimms(self) -> tuple[Dimm, ...]:
        """Return the DIMMs that the standby lacks, if this was the only difference at the last
        complete comparison; otherwise ()."""
        return self._dimms

    def accept(self) -> None:
        """Record that the standby now has the devices of the last complete comparison.

        Raises OSError.
        """
        atomic_file.put(self._file, json.dumps(self._now))
        self._known, self._dimms = self._now, ()
        self._names = frozenset(self._now["names"])

    def same(self) -> bool:
        """Compare the devices completely, and take down the links of new network cards.

        Returns whether the standby has the same devices. Raises HypervisorError, OSError.
        """
        self._endings.keep()
        self._told.clear()
        found = _Found.of(self._monitor)
        self._now = now = found.facts()
        if self._known is None:
            self._known = now
            atomic_file.put(self._file, json.dumps(now))
        self._names, self._seen = frozenset(self._known["names"]), frozenset(now["names"])
        self._cut(self._seen - self._names)
        self._dimms = new_dimms(self._known, found)
        return bool(self._known["digest"] == now["digest"] and self._seen == self._names)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A guest's devices, as QEMU lists them."""

    names: frozenset[str]
    pci: list[Any]
    disks: list[Any]
    memory: Mapping[str, int]
    """Sizes in bytes, by kind."""
    dimms: tuple[Dimm, ...]

    @classmethod
    def of(cls, monitor: Commands) -> Self:
        """Query QEMU for the devices. Raises HypervisorError."""
        names = _names(monitor)
        while True:
            told = monitor.ask("query-memory-devices")
            found = cls(
                names=names, pci=monitor.ask("query-pci"), disks=monitor.ask("query-block"),
                memory=monitor.ask("query-memory-size-summary"),
                dimms=tuple(Dimm.from_qmp(one["data"]) for one in told if one["type"] == "dimm"),
            )  # fmt: skip
            names = _names(monitor)
            if names == found.names:  # all answers are of one moment
                return found

    def facts(self) -> dict[str, Any]:
        """See `device_facts`."""
        return {"names": sorted(self.names), "digest": self.digest()}

    def digest(self, less: int = 0) -> str:
        """Return a digest of devices, disks and memory sizes.

        `less`: number of bytes to subtract from the size of the plugged memory.
        """
        buses = [
            sorted(
                f"{one['bus']}.{one['slot']}.{one['function']} {one['id']}"
                for one in bus["devices"]
            )
            for bus in self.pci
        ]
        disks = sorted(str(one.get("qdev") or one["device"]) for one in self.disks)
        memory = dict(self.memory)
        if less:
            memory[_PLUGGED] = memory.get(_PLUGGED, 0) - less
        told = json.dumps([buses, disks, memory], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()


def device_facts(monitor: Commands) -> dict[str, Any]:
    """Return the guest's devices: their `names`, and a `digest` of what a standby must match.

    Raises HypervisorError.
    """
    return _Found.of(monitor).facts()


def new_dimms(known: Mapping[str, Any], found: _Found) -> tuple[Dimm, ...]:
    """Return the DIMMs that were plugged in, if that is the only difference; otherwise (). Pure.

    `known`: the standby's `device_facts`.
    """
    names = frozenset(known["names"])
    new = tuple(one for one in found.dimms if one.name not in names)
    if found.names != names | {one.name for one in new}:
        return ()
    return new if known["digest"] == found.digest(sum(one.size for one in new)) else ()


def _names(monitor: Commands) -> frozenset[str]:
    told = monitor.ask("qom-list", path=_PERIPHERAL)
    return frozenset(one["name"] for one in told if one["type"].startswith("child<"))
