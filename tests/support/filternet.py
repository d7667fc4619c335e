"""A QEMU whose filters work as net/filter-buffer.c, net/filter-mirror.c and net/dump.c do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.replicas import Qemu
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.replication.primary.network_buffer import MOST, Buffers
from vmckpt.replication.primary.network_filters import LONGEST
from vmckpt.units import Seconds

CARDS = ("net0", "net1")
OWNER = (os.getuid(), os.getgid())
REDIRECTOR = "filter-redirector"


@dataclass
class Filter:
    """One object at a card."""

    kind: str
    card: str
    file: int = -1
    on: bool = True
    interval: float = 0.0
    fires: float = 0.0
    """When its timer lets out what it has."""
    waiting: list[int] = field(default_factory=list)


class Net(Qemu):
    """Packets meet the filters of their card from the last in the list to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.filters: dict[str, Filter] = {}
        self.order: list[str] = []
        """From the wire to the guest."""
        self.wire: dict[str, list[int]] = {card: [] for card in CARDS}
        self.types = ["filter-buffer", REDIRECTOR]
        self.chardevs: list[str] = []
        self.links: list[str] = []
        self.now = 1000.0
        """The guest's clock, and the host's."""

    def send(self, card: str, *packets: int) -> None:
        for packet in packets:
            self._pass(card, packet, self._chain(card))

    def advance(self, seconds: float) -> None:
        """The guest runs for so long; timers fire in their order."""
        end = self.now + seconds
        while due := [
            one for one in self.filters.items() if one[1].on and self._fires(one[1], end)
        ]:
            name, one = min(due, key=lambda pair: pair[1].fires)
            self.now = one.fires
            one.fires += one.interval
            self._flush(name)
        self.now = end

    def _fires(self, one: Filter, end: float) -> bool:
        return one.kind == "filter-buffer" and one.fires <= end

    def _chain(self, card: str) -> list[str]:
        return [name for name in reversed(self.order) if self.filters[name].card == card]

    def _pass(self, card: str, packet: int, chain: list[str]) -> None:
        for name in chain:
            one = self.filters[name]
            if one.kind == "filter-dump":
                os.write(one.file, bytes(17))
            elif one.on:
                if one.kind == "filter-buffer" and len(one.waiting) < MOST:
                    one.waiting.append(packet)
                return
        self.wire[card].append(packet)

    def _flush(self, name: str) -> None:
        one = self.filters[name]
        chain = self._chain(one.card)
        packets, one.waiting = one.waiting, []
        for packet in packets:
            self._pass(one.card, packet, chain[chain.index(name) + 1 :])

    def ask(self, command: str, **arguments: object) -> Any:
        match command:
            case "qom-list":
                assert arguments == {"path": "/objects"}
                return [{"name": name, "type": "child<x>"} for name in ("ram", *self.filters)]
            case "qom-list-types":
                assert arguments == {"implements": "netfilter"}
                return [{"name": name} for name in self.types]
            case "query-chardev":
                return [{"label": name} for name in ("monitor", *self.chardevs)]
            case _:
                return super().ask(command, **arguments)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        super().tell(command, arguments, files=files)
        name = arguments.get("id", str(arguments.get("path")).rpartition("/")[2])
        match command:
            case "object-add":
                self._add(name, arguments)
            case "object-del":
                self._known(name)
                self._flush(name)
                if self.filters[name].file >= 0:
                    os.close(self.filters[name].file)
                self.order.remove(name)
                del self.filters[name]
            case "qom-set":
                self._known(name)
                assert arguments["property"] == "status"
                self._switch(name, arguments["value"] == "on")
            case "chardev-add":
                assert arguments["backend"] == {"type": "null", "data": {}}
                if name in self.chardevs:
                    raise QmpRefused(f"Chardev with id '{name}' already exists", host=self.host)
                self.chardevs.append(name)
            case "chardev-remove":
                if name in self.filters:
                    raise QmpRefused(f"Chardev '{name}' is busy", host=self.host)
                self.chardevs.remove(name)
            case "set_link":
                self.links.append(f"{arguments['name']} {'up' if arguments['up'] else 'down'}")
            case _:
                raise AssertionError(command)

    def _switch(self, name: str, on: bool) -> None:
        one = self.filters[name]
        if one.on == on:
            return
        one.on, one.fires = on, self.now + one.interval
        if not on:
            self._flush(name)

    def _known(self, name: str) -> None:
        if name not in self.filters:
            raise QmpRefused(f"object '{name}' not found", host=self.host)

    def _add(self, name: str, told: dict[str, Any]) -> None:
        assert name not in self.filters
        assert told["queue"] == "rx"
        made = Filter(told["qom-type"], told["netdev"].removeprefix("host"))
        if made.card not in self.wire:
            raise QmpRefused("Parameter 'netdev' expects a network backend id", host=self.host)
        if made.kind == "filter-dump":
            assert told["maxlen"] == 1
            made.file = os.open(told["file"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(made.file, bytes(24))
        elif made.kind == REDIRECTOR:
            assert told["outdev"] in self.chardevs
        else:
            made.interval = told["interval"] / 1e6
            made.fires = self.now + made.interval
            made.on = told["status"] == "on"
        at = len(self.order)
        if "position" in told:
            assert told["insert"] == "before"
            at = self.order.index(told["position"].removeprefix("id="))
        self.order.insert(at, name)
        self.filters[name] = made

    def unplug(self, card: str) -> None:
        """Its filters go with it."""
        del self.wire[card]
        for name in [name for name, one in self.filters.items() if one.card == card]:
            self.order.remove(name)
            del self.filters[name]

    def described(self) -> str:
        return "<domain/>"


def buffers_of(net: Net, folder: Path, *cards: str, interval: Seconds = LONGEST) -> Buffers:
    return Buffers(net, cards or CARDS, folder, OWNER, interval=interval, clock=lambda: net.now)


@contextmanager
def network() -> Iterator[Net]:
    """One without filters; what they wrote to is closed in the end."""
    made = Net()
    yield made
    for one in made.filters.values():
        with suppress(OSError):
            os.close(one.file)
