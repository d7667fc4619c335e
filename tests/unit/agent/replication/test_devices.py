"""Cards that are plugged in while a standby may take over send nothing until it is invalid."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.replicas import Qemu, until
from vmckpt.agent.replication.devices import Devices, device_facts
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.lifecycle import Endings
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.replication.primary import new_nics
from vmckpt.replication.primary.new_nics import NewCards
from vmckpt.replication.protocol.memory_layout import Dimm

DOWN = """<domain><devices>
<interface type='bridge'><alias name='net1'/><link state='down'/></interface>
<interface type='bridge'><alias name='net2'/></interface>
<disk><alias name='disk1'/></disk></devices></domain>"""


class Guest(Qemu):
    """Its devices, and the links of its cards."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {"net0", "disk0"}
        self.links = {"net0": True}
        self.memory = 1 << 30
        self.xml = "<domain/>"
        self.hangs: threading.Event | None = None
        self.dimms: dict[str, int] = {}
        """Sizes of DIMMs that it has or had."""
        self.on_look: Callable[[], object] = lambda: None

    def plug_memory(self, name: str, size: int = 1 << 27) -> None:
        self.dimms[name] = size
        self.names.add(name)

    def plug(self, name: str) -> None:
        self.names.add(name)
        if name.startswith("net"):
            self.links[name] = True

    def ask(self, command: str, **arguments: object) -> Any:
        match command:
            case "qom-list":
                assert arguments == {"path": "/machine/peripheral"}
                devices = [{"name": name, "type": "child<some>"} for name in self.names]
                return [{"name": "type", "type": "string"}, *devices]
            case "query-pci":
                device = {"bus": 0, "slot": 3, "function": 0}
                return [{"devices": [{**device, "id": "x"}] * len(self.names - {*self.dimms})}]
            case "query-block":
                return []
            case "query-memory-size-summary":
                plugged = sum(size for name, size in self.dimms.items() if name in self.names)
                return {"base-memory": self.memory, "plugged-memory": plugged}
            case "query-memory-devices":
                self.on_look()
                return [
                    {
                        "type": "dimm",
                        "data": {
                            "id": name,
                            "size": size,
                            "node": 0,
                            "slot": 3,
                            "addr": 1 << 32,
                            "memdev": f"/objects/mem{name}",
                            "hotplugged": True,
                        },
                    }
                    for name, size in self.dimms.items()
                    if name in self.names
                ] + [{"type": "virtio-mem", "data": {"id": "virtiomem0", "size": 0}}]
            case _:
                return super().ask(command, **arguments)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        super().tell(command, arguments, files=files)
        assert command == "set_link"
        if self.hangs is not None:
            self.hangs.wait(5.0)
        if arguments["name"] not in self.links:
            raise QmpRefused(f"Device '{arguments['name']}' not found", host=self.host)
        self.links[arguments["name"]] = arguments["up"]

    def described(self) -> str:
        return self.xml


@pytest.fixture
def guest() -> Guest:
    return Guest()


@pytest.fixture
def new_cards(guest: Guest, tmp_path: Path) -> NewCards:
    made = NewCards(guest, tmp_path)
    made.hold()
    return made


@pytest.fixture
def endings() -> Endings:
    return cast("Endings", SimpleNamespace(on_device=None, keep=lambda: None))


@pytest.fixture
def devices(
    guest: Guest, tmp_path: Path, new_cards: NewCards, endings: Endings
) -> Iterator[Devices]:
    with Devices(guest, tmp_path, new_cards, endings) as made:
        assert made.same()
        yield made


@pytest.mark.parametrize("look", ["same", "still"])
def test_a_new_card_has_no_link_until_the_standby_is_invalid(
    guest: Guest, devices: Devices, new_cards: NewCards, look: str
) -> None:
    assert getattr(devices, look)()
    guest.plug("net1")
    assert not getattr(devices, look)()
    assert guest.links == {"net0": True, "net1": False}
    assert not getattr(devices, look)()
    new_cards.connect()
    assert guest.links == {"net0": True, "net1": True}


def test_an_event_is_enough_and_does_not_wait_for_qemu(
    guest: Guest, devices: Devices, endings: Endings
) -> None:
    assert endings.on_device is not None
    guest.hangs = threading.Event()
    told = [devices.told]
    guest.plug("net1")
    endings.on_device("net1", True)
    told.append(devices.told)
    guest.hangs.set()
    until(lambda: guest.links["net1"] is False)
    assert not devices.same()
    assert [*told, devices.told] == [False, True, False]


def test_a_card_that_comes_in_the_place_of_one_before_is_new(
    guest: Guest, devices: Devices, endings: Endings
) -> None:
    """Its filters are gone; its name is not."""
    assert endings.on_device is not None
    endings.on_device("net0", False)
    assert devices.told
    assert guest.links["net0"]
    endings.on_device("net0", True)
    until(lambda: not guest.links["net0"])


def test_what_is_no_card_is_no_standby_s_either(
    guest: Guest, devices: Devices, tmp_path: Path
) -> None:
    guest.plug("disk1")
    assert not devices.still()
    assert not devices.same()
    new_nics.connect(guest, tmp_path)
    assert guest.links == {"net0": True}


def test_a_device_that_is_gone_and_memory_of_another_size_are_seen(
    guest: Guest, devices: Devices
) -> None:
    guest.memory *= 2
    assert devices.still()
    assert not devices.same()
    guest.memory //= 2
    assert devices.same()
    guest.names.remove("disk0")
    assert not devices.still()
    assert devices.gone == {"disk0"}
    assert not devices.same()


def test_a_card_that_came_before_the_first_agent_is_none_of_the_standby_s(
    guest: Guest, new_cards: NewCards, endings: Endings, tmp_path: Path
) -> None:
    """The standby's definition was made by what the guest had then."""
    known = device_facts(guest)
    guest.plug("net1")
    with Devices(guest, tmp_path, new_cards, endings, known=known) as later:
        assert not later.same()
        assert not later.still()
    assert guest.links == {"net0": True, "net1": False}


def test_a_later_agent_knows_what_the_first_one_saw(
    guest: Guest, devices: Devices, tmp_path: Path, endings: Endings
) -> None:
    del devices
    guest.plug("net1")
    later = NewCards(guest, tmp_path)
    with Devices(guest, tmp_path, later, endings) as again:
        later.hold()
        assert not again.still()
    assert guest.links["net1"] is False


def test_a_later_agent_connects_cards_that_one_before_has_cut(
    guest: Guest, devices: Devices, tmp_path: Path
) -> None:
    guest.plug("net1")
    assert not devices.still()
    new_nics.connect(guest, tmp_path)
    assert guest.links["net1"]
    before = len(guest.events)
    new_nics.connect(guest, tmp_path)
    assert len(guest.events) == before


def test_a_link_that_libvirt_has_down_stays_down(
    guest: Guest, devices: Devices, new_cards: NewCards
) -> None:
    guest.xml = DOWN
    for card in ("net1", "net2"):
        guest.plug(card)
    assert not devices.still()
    new_cards.connect()
    assert guest.links == {"net0": True, "net1": False, "net2": True}


def test_a_card_that_is_unplugged_again_hinders_nothing(
    guest: Guest, devices: Devices, new_cards: NewCards
) -> None:
    guest.plug("net1")
    assert not devices.still()
    guest.names.remove("net1")
    del guest.links["net1"]
    new_cards.connect()
    assert devices.still()


def test_while_no_output_waits_a_new_card_sends_at_once(
    guest: Guest, devices: Devices, new_cards: NewCards
) -> None:
    new_cards.connect()
    guest.plug("net1")
    assert not devices.still()
    assert guest.links["net1"]


def test_a_link_that_cannot_be_set_is_tried_again_at_the_next_look(
    guest: Guest, devices: Devices, endings: Endings
) -> None:
    assert endings.on_device is not None
    guest.plug("net1")
    guest.fails["set_link"] = HypervisorError("the monitor hangs", host="alpha")
    endings.on_device("net1", True)
    until(lambda: guest.events == ["set_link"])
    until(lambda: not guest.fails)
    assert guest.links["net1"]
    assert not devices.still()
    assert not guest.links["net1"]


DIMM = Dimm(name="dimm3", size=1 << 27, node=0, slot=3, address=1 << 32)


def test_memory_that_is_plugged_in_is_no_other_machine_but_a_part_that_lacks(
    guest: Guest, devices: Devices, tmp_path: Path, new_cards: NewCards, endings: Endings
) -> None:
    guest.plug_memory("dimm3")
    assert not devices.still()
    assert not devices.same()
    assert [*devices.dimms] == [DIMM]
    devices.accept()
    assert [*devices.dimms] == []
    assert devices.still()
    assert devices.same()
    before = {"names": ["disk0", "net0"], "digest": "of the standby's definition"}
    with Devices(guest, tmp_path, new_cards, endings, known=before) as later:
        assert later.same(), "a later agent knows that the standby got it"


@pytest.mark.parametrize("more", ["a card", "a disk is gone", "memory of another size"])
def test_memory_and_something_else_is_another_machine(
    guest: Guest, devices: Devices, more: str
) -> None:
    guest.plug_memory("dimm3")
    if more == "a card":
        guest.plug("net1")
    elif more == "a disk is gone":
        guest.names.remove("disk0")
    else:
        guest.memory += 1 << 20
    assert not devices.same()
    assert devices.dimms == ()


def test_memory_that_is_unplugged_is_another_machine(guest: Guest, devices: Devices) -> None:
    guest.plug_memory("dimm3")
    assert not devices.same()
    devices.accept()
    guest.names.remove("dimm3")
    assert not devices.still()
    assert not devices.same()
    assert devices.dimms == ()
    assert devices.gone == {"dimm3"}


def test_memory_that_is_plugged_in_during_a_look_is_all_seen(
    guest: Guest, devices: Devices
) -> None:
    """Else its name would be there and its size not, as if something else had changed."""
    names = ["dimm4", "dimm3"]

    def plug() -> None:
        if names:
            guest.plug_memory(names.pop())

    guest.on_look = plug
    assert not devices.same()
    assert {one.name for one in devices.dimms} == {"dimm3", "dimm4"}
