"""A guest's output held: what it sends waits in QEMU until it is let out, and nothing is lost.

For each card a `filter-buffer` between it and the network. It never stays longer than a limit:
QEMU itself lets out what is older, and a process beside us (`network_hold_undo_process`) takes the
filters away when we die or hang. QEMU drops what comes after 10,000 packets: hold for as short as
can be.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self
from xml.etree import ElementTree as ET

from vmckpt.capture import migration_settings
from vmckpt.capture.memory.undo_process import UndoProcess
from vmckpt.errors import CannotCapture, CaptureFailed, HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.units import Seconds

LIMIT = Seconds(15.0)
"""Output is held no longer."""
_MARGIN = Seconds(0.5)
HELD = b"h"
"""What the keeper is told when holding begins."""
_MARK = "vmckpt-hold-"
_OUTSIDE = ("hostdev", "vhostuser", "vdpa")
"""Kinds of card whose packets QEMU never sees."""
_VHOST = "/dev/vhost-net"


class Commands(migration_settings.Commands, Protocol):
    """What is used of `hypervisor.qmp.QmpMonitor`."""

    def described(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A network card of a running guest."""

    name: str
    """libvirt's: "net0"."""
    kind: str
    """bridge, network, direct, hostdev, ..."""
    model: str | None
    driver: str | None
    """Who moves its packets, if that was told: "qemu" or "vhost"."""
    queues: int


def cards(xml: str) -> tuple[Card, ...]:
    """A running guest's cards, those among its passed-through devices too."""
    root = domain_xml.tree(xml, "domain")
    found = []
    for node in root.findall("devices/interface"):
        driver = node.find("driver")
        told = dict(driver.attrib) if driver is not None else {}
        found.append(
            Card(
                name=_attribute(node.find("alias"), "name") or "a card without a name",
                kind=node.get("type", ""),
                model=_attribute(node.find("model"), "type"),
                driver=told.get("name"),
                queues=int(told.get("queues", "1")),
            )
        )
    # What a passed-through device is nobody can tell from here; it may well be a card.
    for node in root.findall("devices/hostdev"):
        if node.get("type") == "pci":
            name = _attribute(node.find("alias"), "name") or "a passed-through device"
            found.append(Card(name=name, kind="hostdev", model=None, driver=None, queues=1))
    return tuple(found)


def _attribute(node: ET.Element | None, name: str) -> str | None:
    return None if node is None else node.get(name)


def why_not(card: Card, *, vhost: bool) -> str | None:
    """Why the output of a card cannot be held; None: it can. Pure.

    `vhost`: its QEMU uses the kernel's vhost for some card, and libvirt does not tell for which.
    """
    if card.kind in _OUTSIDE:
        return f"its {card.name} ({card.kind}) sends past QEMU"
    virtio = (card.model or "").startswith("virtio")
    if card.driver == "vhost" or (vhost and virtio and card.driver is None):
        return f"its {card.name} uses vhost"
    if card.queues > 1:
        return f"its {card.name} has {card.queues} queues"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldUndo:
    """What holding leaves behind if it dies."""

    guest: str
    """Its UUID."""
    cards: tuple[str, ...]
    runs: bool
    """It ran before."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if it is none."""
        told = json.loads(text)
        try:
            undo = cls(**(told | {"cards": tuple(told["cards"])}))
        except (TypeError, LookupError) as exc:
            raise ValueError(f"no facts of held output: {text[:60]!r}") from exc
        words = all(isinstance(one, str) for one in (undo.guest, *undo.cards))
        if not words or not isinstance(undo.runs, bool):
            raise ValueError(f"no facts of held output: {text[:60]!r}")
        return undo


def hold_facts(monitor: Commands) -> HoldUndo:
    """The facts before the guest's output is held; nothing is changed.

    Raises CannotCapture, naming the cards, if it cannot be, and HypervisorError.
    """
    known = cards(monitor.described())
    vhost = _uses_vhost(monitor.guest)
    reasons = [why for card in known if (why := why_not(card, vhost=vhost)) is not None]
    if reasons:
        raise CannotCapture(
            f"{monitor.name} on {monitor.host}: its output cannot be held: {', '.join(reasons)}",
            hint="give its cards <driver name='qemu'/> without queues, and start it anew",
        )
    names = tuple(card.name for card in known)
    return HoldUndo(guest=monitor.guest, cards=names, runs=monitor.run_state() == "running")


def _uses_vhost(guest: str) -> bool:
    """Whether QEMU has the kernel's vhost open, for any card. Only true on the guest's host."""
    process = identity.hold(guest)
    if process is None:
        return False
    with process:
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(file) == _VHOST:  # noqa: PTH115 - it names a device
                    return True
    return False


class OutputHold:
    """Output that can be held and let out once. Use as `with OutputHold(...) as hold`.

    Leaving it lets all out, whatever happened.
    """

    def __init__(
        self,
        monitor: Commands,
        undo: HoldUndo,
        *,
        limit: Seconds = LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`undo`: from `hold_facts`, and noted since."""
        self._monitor, self._undo, self._limit, self._clock = monitor, undo, limit, clock
        self._keeper: UndoProcess | None = None
        self._since: float | None = None
        """When holding began; None: nothing is held."""

    def __enter__(self) -> Self:
        facts = json.dumps({"undo": self._undo.to_json(), "limit": self._limit})
        self._keeper = UndoProcess(
            uri=self._monitor.uri, host=self._monitor.host, undo=facts, stream=None,
            module="vmckpt.capture.network_hold_undo_process",
        )  # fmt: skip
        self._keeper.__enter__()
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Raises CaptureFailed if some of it may still be held."""
        self.drop()
        if self._keeper is not None:
            self._keeper.__exit__(kind, error, trace)

    def begin(self) -> None:
        """From now on nothing gets out. Raises CannotCapture, HypervisorError."""
        assert self._keeper is not None
        self._keeper.tell(HELD)
        self._since = self._clock()
        try:
            for card in self._undo.cards:
                self._monitor.tell("object-add", _filter(card, self._limit))
        except QmpRefused as exc:
            raise CannotCapture(
                f"{self._monitor.name} on {self._monitor.host}: its output cannot be held:"
                f" {exc.message}",
                hint="give its cards <driver name='qemu'/> without queues, and start it anew",
            ) from exc

    def let_go(self) -> Seconds:
        """All goes out, in its order; how long it was held.

        Raises CaptureFailed if some of it may have gone out before, and HypervisorError.
        """
        if self._since is None:
            raise ValueError("no output is held")
        held = Seconds(self._clock() - self._since)
        gone = remove(self._monitor, self._undo.cards)
        self._over()
        if gone or held > self._limit - _MARGIN:
            raise CaptureFailed(
                f"{self._monitor.name} on {self._monitor.host}: its output was not held to the end"
                f" ({held:.1f} s; {self._limit:g} s is the limit)",
                hint="try again when hosts and network are less busy",
            )
        return held

    def drop(self) -> None:
        """The same for a cut that failed; fine if all is out. Where that fails the keeper tries."""
        with suppress(HypervisorError):
            if self._since is not None:
                remove(self._monitor, self._undo.cards)
            self._over()

    def _over(self) -> None:
        self._since = None
        if self._keeper is not None:
            self._keeper.all_well()


def _filter(card: str, limit: Seconds) -> dict[str, object]:
    """A filter that takes what the guest sends ("rx" is as the network sees it)."""
    return {
        "qom-type": "filter-buffer",
        "id": _MARK + card,
        "netdev": f"host{card}",
        "queue": "rx",
        "interval": int(limit * 1e6),
    }


def remove(monitor: migration_settings.Commands, names: Sequence[str]) -> tuple[str, ...]:
    """Take the filters of cards away, which lets out what they hold; those that had none.

    Tries all of them. Raises HypervisorError.
    """
    gone, failed = [], None
    for name in names:
        try:
            monitor.tell("object-del", {"id": _MARK + name})
        except HypervisorError as exc:
            if "not found" in exc.message:
                gone.append(name)
            else:
                failed = exc
    if failed is not None:
        raise failed
    return tuple(gone)


def put_back(monitor: migration_settings.Commands, undo: HoldUndo, *, resume: bool = False) -> None:
    """Let out what a dead cut holds; may be repeated. Raises HypervisorError.

    `resume`: the guest runs on, too, if it stands still and no capture is at work. For one whose
    agent hangs: the cut is lost by then, so nothing can be wrong with it.
    """
    remove(monitor, undo.cards)
    if not resume or not undo.runs or monitor.run_state() != "paused":
        return
    status = monitor.ask("query-migrate").get("status", "none")
    if status not in migration_settings.ACTIVE and not monitor.paused_by_user():
        monitor.tell("cont", {})
