"""Replacing network cards on a host: nothing that is unplugged stays unplugged unnoticed."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree as ET

import libvirt
import pytest

from vmckpt.agent import network_cards
from vmckpt.agent.orders import CardsOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.capture import network_hold
from vmckpt.capture.network_cards import CardReport
from vmckpt.definition.elements import mac_of
from vmckpt.errors import BadInput, GuestLocked, HypervisorError, OutcomeUnknown
from vmckpt.hypervisor import hotplug
from vmckpt.model.guest import GuestInterface
from vmckpt.units import Seconds

MACS = ("52:54:00:00:00:01", "52:54:00:00:00:02")


def element(number: int, driver: str = "") -> str:
    return (
        f"<interface type='bridge'><mac address='{MACS[number]}'/><source bridge='lo'/>"
        f"<target dev='vnet{number}'/><model type='virtio'/>{driver}<alias name='net{number}'/>"
        "</interface>"
    )


class Killed(BaseException):
    """The agent is killed."""


class Guest:
    """A running guest with two cards that use vhost, and a guest agent."""

    name, host = "web1", "alpha"

    def __init__(self) -> None:
        self.cards = [ET.fromstring(element(0)), ET.fromstring(element(1))]
        self.run: int | None = 7
        self.state = "running"
        self.known = True
        self.done: list[str] = []
        self.addresses: list[dict[str, str]] = [
            dict(zip(MACS, ("10.0.0.1", "10.0.0.2"), strict=True))
        ]
        """What the agent reports, one report after the other; the last one again and again."""
        self.on_unplug: Callable[[ET.Element], bool] = lambda _: True
        """Whether the guest releases the card."""
        self.on_plug: Callable[[ET.Element], None] = lambda _: None

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def described(self) -> str:
        devices = "".join(ET.tostring(card, encoding="unicode") for card in self.cards)
        return f"<domain><name>web1</name><devices>{devices}</devices></domain>"

    def run_state(self) -> str:
        return self.state

    def find(self, mac: str) -> ET.Element | None:
        return next((card for card in self.cards if mac_of(card) == mac), None)

    def unplug(self, _: object, text: str) -> None:
        card = ET.fromstring(text)
        self.done.append(f"unplug {mac_of(card)[-1]}")
        if self.on_unplug(card):
            self.release(mac_of(card))

    def release(self, mac: str) -> None:
        self.cards = [card for card in self.cards if mac_of(card) != mac]

    def plug(self, _: object, text: str) -> None:
        card = ET.fromstring(text)
        self.done.append(f"plug {mac_of(card)[-1]}")
        self.on_plug(card)
        self.cards.append(card)

    def interfaces(self) -> Sequence[GuestInterface]:
        if not self.addresses:
            return ()
        told = self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]
        return [
            GuestInterface(name=f"eth{mac[-1]}", mac=mac, addresses=(address,))
            for mac, address in told.items()
        ]

    @property
    def drivers(self) -> dict[str, str | None]:
        return {
            mac_of(card)[-1]: None if (one := card.find("driver")) is None else one.get("name")
            for card in self.cards
        }


def lost(*_: object) -> None:
    raise OutcomeUnknown("alpha: connection lost", host="alpha")


def refuse(*_: object) -> None:
    raise HypervisorError("alpha: unplugging a device: no", host="alpha", code=9)


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Guest:
    made = Guest()

    def opened(*_: object, **__: object) -> Guest:
        if not made.known:
            code = libvirt.VIR_ERR_NO_DOMAIN
            raise HypervisorError("alpha: no such guest", host="alpha", code=code)
        return made

    monkeypatch.setattr(network_cards, "QmpMonitor", opened)
    monkeypatch.setattr(network_hold, "uses_vhost", lambda _: True)
    monkeypatch.setattr(network_cards, "_interfaces", lambda *_: made.interfaces())
    monkeypatch.setattr(hotplug, "unplug", made.unplug)
    monkeypatch.setattr(hotplug, "plug", made.plug)
    monkeypatch.setattr(hotplug, "run_id", lambda _: made.run)
    monkeypatch.setattr(network_cards, "run_dir", lambda *names: tmp_path)
    monkeypatch.setattr(network_cards, "RUN", tmp_path)
    monkeypatch.setattr(network_cards, "_FOLDER", ".")
    for name, value in (("_RELEASE", 0.2), ("_RETURN", 0.2), ("_TURN", 0.01), ("_PATIENCE", 0.0)):
        monkeypatch.setattr(network_cards, name, Seconds(value))
    return made


def order(what: str, **more: Any) -> dict[str, Any]:
    told = CardsOrder(what=what, guest="u-1", uri="", host="alpha", **more)
    channel = SimpleNamespace(stop=threading.Event())
    return network_cards.carry_out(told, cast("ControllerChannel", channel))


def replaced(**more: Any) -> list[CardReport]:
    return [
        CardReport.parse(one) for one in json.loads(json.dumps(order("replace", **more)["cards"]))
    ]


def recorded(tmp_path: Path) -> bool:
    return (tmp_path / "u-1.json").exists()


def test_a_look_changes_nothing(guest: Guest, tmp_path: Path) -> None:
    told = order("look")
    assert [CardReport.parse(one).addresses for one in told["cards"]] == [
        ("10.0.0.1",), ("10.0.0.2",),
    ]  # fmt: skip
    assert (told["refused"], told["state"]) == (None, "nothing")
    assert guest.done == []
    assert list(tmp_path.iterdir()) == []


def test_cards_are_replaced_one_after_the_other_and_confirmed(guest: Guest, tmp_path: Path) -> None:
    both = guest.addresses[0]
    guest.addresses = [both, {}, both, {MACS[0]: "10.0.0.1"}, both]
    reports = replaced()

    assert guest.done == ["unplug 1", "plug 1", "unplug 2", "plug 2"]
    assert guest.drivers == {"1": "qemu", "2": "qemu"}
    assert [one.confirmed for one in reports] == [True, True]
    assert all(one.gone is not None and 0 < one.gone < 0.2 for one in reports)
    assert list(tmp_path.iterdir()) == []
    assert replaced() == []


def test_only_chosen_cards_are_replaced(guest: Guest) -> None:
    (report,) = replaced(cards=(MACS[1],))
    assert (report.card, guest.done) == ("net1", ["unplug 2", "plug 2"])


def test_without_a_guest_agent_nothing_is_confirmed_and_nothing_waits(guest: Guest) -> None:
    guest.addresses = []
    assert [(one.replaced, one.agent, one.confirmed) for one in replaced()] == [
        (True, False, None)
    ] * 2


def test_if_the_addresses_do_not_return_no_further_card_is_unplugged(
    guest: Guest, tmp_path: Path
) -> None:
    guest.addresses = [guest.addresses[0], {MACS[0]: "10.0.0.99"}]
    first, second = replaced()

    assert (first.replaced, first.confirmed, first.missing) == (True, False, ("10.0.0.1",))
    assert (second.replaced, second.gone) == (False, None)
    assert guest.drivers == {"2": None, "1": "qemu"}
    assert not recorded(tmp_path)


def test_a_controller_that_is_gone_leaves_no_card_unplugged(guest: Guest, tmp_path: Path) -> None:
    """Its agent plugs in what it unplugged, waits for nothing, and unplugs nothing more."""
    stop = threading.Event()
    guest.on_plug = lambda _: stop.set()
    guest.addresses = [guest.addresses[0], {}]
    told = CardsOrder(what="replace", guest="u-1", uri="", host="alpha")
    channel = cast("ControllerChannel", SimpleNamespace(stop=stop))
    first, second = network_cards.carry_out(told, channel)["cards"]

    assert guest.done == ["unplug 1", "plug 1"]
    assert (first["replaced"], second["replaced"]) == (True, False)
    assert first["gone"] < 0.1
    assert not recorded(tmp_path)
    guest.done.clear()
    assert [one["replaced"] for one in network_cards.carry_out(told, channel)["cards"]] == [False]
    assert guest.done == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda guest: setattr(guest, "state", "paused"), "run state is paused"),
        (lambda guest: guest.cards.append(guest.cards[0]), "2 network cards have the MAC"),
        (
            lambda guest: guest.cards[1].find("source").set("bridge", "br-gone"),
            "net1 is connected to br-gone, which is not active or does not exist",
        ),
    ],
    ids=["paused", "equal", "no-bridge"],
)
def test_cards_that_could_not_be_plugged_in_again_are_not_unplugged(
    guest: Guest, change: Callable[[Guest], None], why: str
) -> None:
    change(guest)
    assert why in order("look")["refused"]
    with pytest.raises(BadInput, match=why) as refused:
        replaced()
    assert refused.value.undone
    assert guest.done == []


def test_a_card_that_the_guest_refuses_to_release_stays(guest: Guest, tmp_path: Path) -> None:
    guest.on_unplug = cast("Any", refuse)
    with pytest.raises(HypervisorError, match=r"web1 keeps its network card net0 .*: no") as told:
        replaced()
    assert told.value.undone
    assert guest.drivers == {"1": None, "2": None}
    assert not recorded(tmp_path)


def test_a_request_that_the_guest_may_still_fulfil_is_recorded(
    guest: Guest, tmp_path: Path
) -> None:
    guest.on_unplug = lambda _: False
    with pytest.raises(HypervisorError, match="did not release its network card net0") as told:
        replaced()
    assert "rebooted" in str(told.value)
    assert not told.value.undone
    assert order("finish", dry=True) == order("finish") == {"state": "old"}
    assert order("look")["state"] == "old"
    with pytest.raises(HypervisorError, match="may still release"):
        replaced()
    assert guest.done == ["unplug 1"]

    guest.release(MACS[0])  # it is rebooted
    assert order("finish", dry=True) == {"state": "absent"}
    assert guest.done == ["unplug 1"]
    assert order("finish") == {"state": "absent"}
    assert guest.drivers == {"2": None, "1": "qemu"}
    assert order("finish") == {"state": "nothing"}


@pytest.mark.parametrize("released", [True, False])
def test_a_call_whose_answer_was_lost_may_have_unplugged_the_card(
    guest: Guest, tmp_path: Path, released: bool
) -> None:
    def unplug(card: ET.Element) -> bool:
        if released:
            guest.release(mac_of(card))
        lost()
        return False

    guest.on_unplug = unplug
    if released:
        assert all(one.replaced for one in replaced())
        assert guest.drivers == {"1": "qemu", "2": "qemu"}
    else:
        with pytest.raises(HypervisorError, match="did not release"):
            replaced()
        assert recorded(tmp_path)


def test_a_request_that_the_guest_lost_is_repeated(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_cards, "_AGAIN", Seconds(0.03))
    guest.on_unplug = lambda _: len(guest.done) > 2
    (report,) = replaced(cards=(MACS[0],))
    assert report.replaced
    assert guest.done == ["unplug 1", "unplug 1", "unplug 1", "plug 1"]


def test_a_killed_agents_card_is_plugged_in_by_the_next(guest: Guest, tmp_path: Path) -> None:
    def kill(_: object) -> None:
        raise Killed

    guest.on_plug = kill
    with pytest.raises(Killed):
        replaced()
    assert guest.drivers == {"2": None}
    assert order("look")["state"] == "absent"

    guest.on_plug = lambda _: None
    (report,) = replaced()
    assert report.card == "net1"
    assert guest.drivers == {"1": "qemu", "2": "qemu"}
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_is_plugged_in_but_still_recorded_is_finished(
    guest: Guest, tmp_path: Path
) -> None:
    record, kept = tmp_path / "u-1.json", list[str]()
    guest.on_plug = lambda _: kept.append(record.read_text())
    replaced(cards=(MACS[0],))
    record.write_text(kept[0])  # as if the agent had been killed right after it plugged the card in
    done = list(guest.done)
    assert order("finish") == {"state": "new"}
    assert guest.done == done
    assert not recorded(tmp_path)


@pytest.mark.parametrize("run", [8, None])
def test_a_guest_that_was_started_again_has_its_cards(
    guest: Guest, tmp_path: Path, run: int | None
) -> None:
    guest.on_unplug = lambda _: False
    with pytest.raises(HypervisorError):
        replaced()
    guest.run = run
    assert order("finish", dry=True) == {"state": "left"}
    assert recorded(tmp_path)
    assert order("finish") == {"state": "left"}
    assert not recorded(tmp_path)


def test_a_guest_that_is_gone_from_the_host_is_left(guest: Guest, tmp_path: Path) -> None:
    guest.on_unplug = lambda _: False
    with pytest.raises(HypervisorError):
        replaced()
    guest.known = False
    assert order("finish") == {"state": "left"}
    assert not recorded(tmp_path)


def test_if_the_new_card_is_refused_the_old_card_is_plugged_in(
    guest: Guest, tmp_path: Path
) -> None:
    def plug(card: ET.Element) -> None:
        if card.find("driver") is not None:
            raise HypervisorError("alpha: plugging in a device: bad driver", host="alpha")

    guest.on_plug = plug
    with pytest.raises(HypervisorError, match=r"old network card net0.*bad driver") as told:
        replaced()
    assert told.value.undone
    assert guest.drivers == {"2": None, "1": None}
    assert guest.find(MACS[0]) is not None
    assert not recorded(tmp_path)


def test_a_card_whose_old_name_is_taken_gets_a_new_name(guest: Guest) -> None:
    def plug(card: ET.Element) -> None:
        if card.find("target") is not None:
            raise HypervisorError("alpha: plugging in a device: vnet0 exists", host="alpha")

    guest.on_plug = plug
    assert [one.replaced for one in replaced()] == [True, True]
    assert guest.drivers == {"1": "qemu", "2": "qemu"}


def test_a_card_that_cannot_be_plugged_in_is_recorded_until_it_can(
    guest: Guest, tmp_path: Path
) -> None:
    guest.on_plug = refuse
    with pytest.raises(HypervisorError, match=r"card net0 .* cannot be plugged in again") as told:
        replaced()
    assert "vmckpt recover" in str(told.value.hint)
    assert not told.value.undone
    with pytest.raises(HypervisorError, match="cannot be plugged in again"):
        order("finish")
    assert recorded(tmp_path)
    guest.on_plug = lambda _: None
    assert order("finish") == {"state": "absent"}
    assert guest.drivers == {"2": None, "1": "qemu"}


def test_two_agents_do_not_replace_the_cards_of_one_guest(guest: Guest, tmp_path: Path) -> None:
    def meanwhile(_: object) -> bool:
        with pytest.raises(GuestLocked):
            order("finish")
        return True

    guest.on_unplug = meanwhile
    assert all(one.replaced for one in replaced())


def test_an_invalid_record_is_not_trusted(guest: Guest, tmp_path: Path) -> None:
    for text in ("[]", "{", '{"run": 7, "card": {"card": 1}}'):
        (tmp_path / "u-1.json").write_text(text)
        with pytest.raises(HypervisorError, match="not a valid record"):
            order("finish")
    assert guest.done == []


def test_interfaces_are_asked_of_the_guest_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    one = GuestInterface(name="eth0", mac=MACS[0], addresses=("10.0.0.1",))

    class Agent:
        answers = True

        def __init__(self, _: object) -> None:
            pass

        def there(self) -> bool:
            return Agent.answers

        def interfaces(self, *, limit: float = 5.0) -> tuple[GuestInterface, ...]:
            if limit < 1:
                raise HypervisorError("alpha: no answer", host="alpha")
            return (one,)

    monkeypatch.setattr(network_cards, "GuestAgent", Agent)
    monitor: Any = None
    assert network_cards._interfaces(monitor) == (one,)
    assert network_cards._interfaces(monitor, Seconds(1.0)) == (one,)
    assert network_cards._interfaces(monitor, Seconds(0.5)) == ()
    Agent.answers = False
    assert network_cards._interfaces(monitor) == ()
