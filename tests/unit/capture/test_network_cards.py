"""Network cards: which must be replaced, by what, and when a new card has its addresses again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.support.held_output import card, xml
from vmckpt.capture import network_cards
from vmckpt.capture.network_cards import Card, CardReport, CardState, Replacement
from vmckpt.definition.elements import attribute
from vmckpt.model.guest import GuestInterface
from vmckpt.units import Seconds

CARD = Card(name="net0", kind="bridge", model="virtio", driver="qemu", queues=1)
MAC, OTHER = "52:54:00:aa:00:01", "52:54:00:aa:00:02"


@pytest.mark.parametrize(
    ("wishes", "vhost", "why"),
    [
        ({}, False, None),
        ({}, True, None),
        ({"driver": None}, False, None),
        ({"driver": None}, True, "uses vhost"),
        ({"driver": None, "model": "e1000"}, True, None),
        ({"driver": "vhost"}, True, "uses vhost"),
        ({"driver": "vhost"}, False, None),  # under TCG, libvirt ignores it
        ({"driver": None, "kind": "user"}, True, None),
        ({"queues": 2}, False, "has 2 queues"),
        ({"kind": "hostdev"}, False, "bypasses QEMU"),
        ({"kind": "vhostuser"}, False, "bypasses QEMU"),
        ({"kind": "vdpa"}, False, "bypasses QEMU"),
        ({"kind": "direct"}, False, None),
    ],
)
def test_what_cannot_be_held(wishes: dict[str, Any], vhost: bool, why: str | None) -> None:
    found = network_cards.why_not(replace(CARD, **wishes), vhost=vhost)
    assert found is None if why is None else why in str(found) and "net0" in str(found)


def test_cards_are_read_from_the_running_guest() -> None:
    passed = "<hostdev mode='subsystem' type='pci'><alias name='hostdev0'/></hostdev>"
    usb = "<hostdev mode='subsystem' type='usb'><alias name='hostdev1'/></hostdev>"
    queued = "<driver name='qemu' queues='4'/>"
    assert network_cards.cards(xml(card(driver="<driver name='qemu'/>"))) == (CARD,)
    found = network_cards.cards(xml(card(driver=queued, name="net1"), passed, usb))
    assert [(one.name, one.kind, one.queues) for one in found] == [
        ("net1", "bridge", 4),
        ("hostdev0", "hostdev", 1),
    ]


def element(
    mac: str = MAC, name: str = "net0", driver: str = "", more: str = "", kind: str = "bridge",
    source: str = "<source bridge='br0'/>", target: str = "vnet7", model: str = "virtio",
) -> str:  # fmt: skip
    """A card in the live XML of a guest, as libvirt writes it."""
    return (
        f"<interface type='{kind}'>\n<mac address='{mac}'/>{source}<target dev='{target}'/>"
        f"<model type='{model}'/>{driver}{more}<alias name='{name}'/><address type='pci'"
        " domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></interface>\n"
    )


def found(*cards: str, vhost: bool = True, chosen: Sequence[str] = ()) -> list[Replacement]:
    return list(network_cards.replacements(xml(*cards), vhost=vhost, chosen=chosen))


def test_a_card_that_uses_vhost_is_replaced_by_the_same_card_without() -> None:
    more = (
        "<bandwidth><inbound average='1000'/></bandwidth><link state='down'/><mtu size='9000'/>"
        "<filterref filter='clean-traffic'/><boot order='1'/>"
    )
    (one,) = found(element(more=more))
    old, new = ET.fromstring(one.old), ET.fromstring(one.new)
    driver = new.find("driver")

    assert (one.card, one.mac, one.why) == ("net0", MAC, "net0 uses vhost")
    assert driver is not None
    assert driver.attrib == {"name": "qemu"}
    new.remove(driver)
    assert ET.tostring(new) == ET.tostring(old)
    assert "clean-traffic" in one.new
    assert [attribute(new, tag, key) for tag, key in (
        ("target", "dev"), ("alias", "name"), ("address", "bus"), ("link", "state"),
    )] == ["vnet7", "net0", "0x01", "down"]  # fmt: skip


def test_queues_are_removed_and_other_settings_of_the_driver_stay() -> None:
    driver = "<driver name='vhost' queues='4' rx_queue_size='512'><host csum='off'/></driver>"
    (one,) = found(element(driver=driver), vhost=False)
    new = ET.fromstring(one.new).find("driver")

    assert one.why == "net0 has 4 queues"
    assert new is not None
    assert new.attrib == {"name": "qemu", "rx_queue_size": "512"}
    assert new.find("host") is not None


@pytest.mark.parametrize(
    ("cards", "vhost", "names"),
    [
        pytest.param([element(driver="<driver name='qemu'/>")], True, [], id="through-qemu"),
        pytest.param([element()], False, [], id="without-vhost"),
        pytest.param([element(model="e1000")], True, [], id="not-virtio"),
        pytest.param([element(kind="vhostuser")], True, [], id="cannot-be-replaced"),
        pytest.param([element(), element(OTHER, "net1")], True, ["net0", "net1"], id="both"),
    ],
)
def test_cards_that_need_nothing_stay(cards: list[str], vhost: bool, names: list[str]) -> None:
    assert [one.card for one in found(*cards, vhost=vhost)] == names


def test_chosen_cards_are_replaced_in_any_case_and_no_others() -> None:
    (one,) = found(element(), element(OTHER, "net1"), vhost=False, chosen=[OTHER])
    assert (one.card, one.why) == ("net1", "net1 was chosen")
    (plain,) = found(element(model="e1000"), vhost=False, chosen=[MAC])
    assert plain.old == plain.new
    assert [one.why for one in found(element(), chosen=[MAC])] == ["net0 uses vhost"]


def test_a_card_on_a_network_is_connected_to_the_network_again() -> None:
    source = "<source network='default' portgroup='web' portid='0d3f' bridge='virbr0'/>"
    (one,) = found(element(source=source))
    for text in (one.old, one.new):
        node = ET.fromstring(text)
        assert node.get("type") == "network"
        (source_node,) = node.findall("source")
        assert source_node.attrib == {"network": "default", "portgroup": "web"}
    assert network_cards.source_of(one.new) == ("network", "default")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("<source bridge='br0'/>", ("device", "br0")),
        ("<source dev='eth0' mode='bridge'/>", ("device", "eth0")),
        ("<source network='n' bridge='virbr0'/>", ("network", "n")),
        ("", None),
    ],
)
def test_what_a_card_is_connected_to(source: str, told: tuple[str, str] | None) -> None:
    assert network_cards.source_of(element(source=source)) == told


def test_a_name_of_libvirt_is_given_up_and_a_name_of_the_operator_is_not() -> None:
    assert "target" not in network_cards.renamed(element())
    assert "macvtap0" not in network_cards.renamed(element(target="macvtap0"))
    assert "web1-out" in network_cards.renamed(element(target="web1-out"))


def test_cards_that_cannot_be_told_apart_are_refused() -> None:
    (one,) = found(element())
    assert network_cards.refusal(xml(element(), element(OTHER)), [one]) is None
    twice = network_cards.refusal(xml(element(), element(MAC.upper())), [one])
    assert twice == f"2 network cards have the MAC address {MAC}"
    assert "no MAC" in str(network_cards.refusal(xml(element()), [replace(one, mac="")]))


def test_the_state_of_an_interrupted_replacement() -> None:
    (one,) = found(element())
    states = [
        network_cards.interrupted(live, one)
        for live in (None, xml(), xml(element(OTHER)), xml(one.new), xml(one.old))
    ]
    assert states == [
        CardState.LEFT, CardState.ABSENT, CardState.ABSENT, CardState.NEW, CardState.OLD,
    ]  # fmt: skip


def interface(name: str, *addresses: str, mac: str = MAC) -> GuestInterface:
    return GuestInterface(name=name, mac=mac, addresses=addresses)


LOCAL, SIX, SEVEN = "fe80::1", "2001:db8::6", "2001:db8::7"


@pytest.mark.parametrize(
    ("before", "after", "awaited", "missing"),
    [
        pytest.param(["10.0.0.5", LOCAL], ["10.0.0.5"], ["10.0.0.5"], [], id="back"),
        pytest.param(["10.0.0.5", SIX], ["10.0.0.5"], ["10.0.0.5"], [], id="ipv4-is-enough"),
        pytest.param(["10.0.0.5"], [], ["10.0.0.5"], ["10.0.0.5"], id="not-yet"),
        pytest.param(["10.0.0.5"], ["10.0.0.9"], ["10.0.0.5"], ["10.0.0.5"], id="another"),
        pytest.param(
            ["10.0.0.5", "10.0.0.6"], ["10.0.0.5"], ["10.0.0.5", "10.0.0.6"], ["10.0.0.6"],
            id="only-one-of-two",
        ),
        pytest.param([LOCAL, SIX, SEVEN], [SIX], [SIX, SEVEN], [], id="one-ipv6-is-enough"),
        pytest.param([SIX, SEVEN], [LOCAL], [SIX, SEVEN], [SIX, SEVEN], id="no-ipv6-yet"),
        pytest.param([LOCAL], [], [], [], id="nothing-to-wait-for"),
        pytest.param([], [], [], [], id="no-address"),
    ],
)  # fmt: skip
def test_addresses_that_must_return(
    before: list[str], after: list[str], awaited: list[str], missing: list[str]
) -> None:
    wanted = network_cards.awaited([interface("eth0", *before)], MAC)
    assert wanted == tuple(awaited)
    now = [interface("eth0", *after), interface("eth1", *before, mac=OTHER)]
    assert network_cards.missing(wanted, now, MAC) == tuple(missing)


def test_interfaces_that_share_a_mac_are_named() -> None:
    bond = [interface("eth0"), interface("bond0", "10.0.0.5"), interface("eth1", mac=OTHER)]
    assert network_cards.sharers(bond, MAC) == ("eth0", "bond0")
    assert network_cards.sharers(bond, OTHER) == ()


REPORT = CardReport(
    card="net0", mac=MAC, why="net0 uses vhost", replaced=True, gone=Seconds(0.75), agent=True,
    addresses=("10.0.0.5",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "confirmed"),
    [
        ({}, True), ({"missing": ("10.0.0.5",)}, False), ({"agent": False}, None),
        ({"addresses": ()}, None), ({"replaced": False, "gone": None}, None),
    ],
)  # fmt: skip
def test_a_report_is_read_as_it_was_sent(changes: dict[str, Any], confirmed: bool | None) -> None:
    report = replace(REPORT, **changes)
    assert CardReport.parse(report.to_json()) == report
    assert report.as_json()["confirmed"] is confirmed


@pytest.mark.parametrize(
    "wrong", [{"gone": -1}, {"gone": "soon"}, {"addresses": None}, {"gone": float("nan")}]
)
def test_an_invalid_report_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        CardReport.parse(REPORT.to_json() | wrong)
    with pytest.raises(TypeError):
        Replacement.from_json({"card": 1, "mac": "", "why": "", "old": "", "new": ""})
