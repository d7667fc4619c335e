"""Find a running guest's network cards that must be replaced, and check the replacement. Pure.

Only QEMU can buffer output. A card whose packets bypass QEMU (vhost), or that has several queues,
is therefore replaced: it is unplugged, and plugged in again with other settings of its driver.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from ipaddress import ip_interface
from typing import Any, Self
from xml.etree import ElementTree as ET

from vmckpt.capture.device_limits import CARDS_OUTSIDE, wants_vhost
from vmckpt.definition.elements import attribute, mac_of
from vmckpt.hypervisor import domain_xml
from vmckpt.model.guest import GuestInterface
from vmckpt.units import Seconds

_NAMED_BY_LIBVIRT = ("vnet", "macvtap", "macvlan")
"""Prefixes of the names that libvirt gives to the host's side of a card."""
_ACTUAL = ("portid", "bridge", "dev", "mode")
"""Attributes of a card on a libvirt network, in the live XML, that describe the connection."""
_LONGEST = 1e6
"""Upper limit for times that an agent reports, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A network card of a running guest."""

    name: str
    """libvirt's alias, such as "net0"."""
    kind: str
    """Type in the definition, such as "bridge"; "hostdev" for a passed-through device."""
    model: str | None
    driver: str | None
    """Backend driver, if the definition sets one: "qemu" or "vhost"."""
    queues: int


def cards(xml: str) -> tuple[Card, ...]:
    """Return a running guest's network cards, and its passed-through PCI devices.

    Raises ValueError if the XML is invalid.
    """
    root = domain_xml.tree(xml, "domain")
    found = [_card(node) for node in root.findall("devices/interface")]
    # The kind of a passed-through device is unknown here, so it is assumed to be a card.
    for node in root.findall("devices/hostdev"):
        if node.get("type") == "pci":
            name = attribute(node, "alias", "name") or "a passed-through device"
            found.append(Card(name=name, kind="hostdev", model=None, driver=None, queues=1))
    return tuple(found)


def _card(node: ET.Element) -> Card:
    driver = node.find("driver")
    told = dict(driver.attrib) if driver is not None else {}
    return Card(
        name=attribute(node, "alias", "name") or "a card without an alias",
        kind=node.get("type", ""),
        model=attribute(node, "model", "type"),
        driver=told.get("name"),
        queues=int(told.get("queues", "1")),
    )


def why_not(card: Card, *, vhost: bool) -> str | None:
    """Return why the output of a card cannot be buffered; None if it can.

    `vhost`: whether QEMU uses the kernel's vhost for any card; libvirt does not report which card.
    """
    if card.kind in CARDS_OUTSIDE:
        return f"{card.name} ({card.kind}) bypasses QEMU"
    if vhost and wants_vhost(card.kind, card.model, card.driver):
        return f"{card.name} uses vhost"
    if card.queues > 1:
        return f"{card.name} has {card.queues} queues"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A card to replace, and its elements for libvirt."""

    card: str
    """libvirt's alias."""
    mac: str
    why: str
    old: str
    new: str

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Parse a replacement from its JSON. Raises TypeError."""
        made = cls(**told)
        if not all(isinstance(one, str) for one in asdict(made).values()):
            raise TypeError("an attribute of a replacement is not a string")
        return made


def replacements(xml: str, *, vhost: bool, chosen: Sequence[str] = ()) -> tuple[Replacement, ...]:
    """Return the cards to replace, in the order of the guest's live XML.

    `vhost`: see `why_not`. `chosen`: MAC addresses of cards that are replaced in any case; empty:
    only cards whose output cannot be buffered are replaced. Cards that bypass QEMU whatever their
    driver are not returned. Raises ValueError if the XML is invalid.
    """
    return tuple(_replacements(xml, vhost=vhost, chosen=chosen))


def _replacements(xml: str, *, vhost: bool, chosen: Sequence[str]) -> Iterator[Replacement]:
    for node in domain_xml.tree(xml, "domain").findall("devices/interface"):
        card, mac = _card(node), mac_of(node)
        why = why_not(card, vhost=vhost)
        if chosen:
            why = (why or f"{card.name} was chosen") if mac in chosen else None
        if why is None or card.kind in CARDS_OUTSIDE:
            continue
        yield Replacement(
            card=card.name, mac=mac, why=why,
            old=_text(_pluggable(node)), new=_text(_through_qemu(_pluggable(node))),
        )  # fmt: skip


def _pluggable(node: ET.Element) -> ET.Element:
    """Return the element that plugs the same card in again.

    The live XML of a card on a libvirt network describes the connection that the network provided.
    With this description, libvirt would no longer connect the card to the network.
    """
    made = copy.deepcopy(node)
    made.tail = None
    source = made.find("source")
    if source is not None and source.get("network"):
        made.set("type", "network")
        for name in _ACTUAL:
            source.attrib.pop(name, None)
    return made


def _through_qemu(node: ET.Element) -> ET.Element:
    """Change a virtio card's element so that its packets pass through QEMU, in a single queue.

    The element of another model is not changed. Returns the element.
    """
    if not (attribute(node, "model", "type") or "").startswith("virtio"):
        return node
    driver = node.find("driver")
    if driver is None:
        driver = ET.SubElement(node, "driver")
    driver.set("name", "qemu")
    driver.attrib.pop("queues", None)
    return node


def renamed(element: str) -> str:
    """Return an element without the name that libvirt gave to the host's side of the card.

    libvirt then chooses a new name, for example because another card has the old name by now.
    """
    node = ET.fromstring(element)
    target = node.find("target")
    if target is not None and target.get("dev", "").startswith(_NAMED_BY_LIBVIRT):
        target.attrib.pop("dev")
        if not target.attrib:
            node.remove(target)
    return _text(node)


def _text(node: ET.Element) -> str:
    return ET.tostring(node, encoding="unicode")


def plugged(xml: str, mac: str) -> ET.Element | None:
    """Return the card with this MAC address in a guest's live XML; None if there is none.

    Raises ValueError if the XML is invalid.
    """
    for node in domain_xml.tree(xml, "domain").findall("devices/interface"):
        if mac_of(node) == mac:
            return node
    return None


def is_new(node: ET.Element, card: Replacement) -> bool:
    """Return whether a plugged-in card has the driver settings of the replacement."""
    seen, wanted, before = (
        _driver(one) for one in (node, ET.fromstring(card.new), ET.fromstring(card.old))
    )
    return seen == wanted and wanted != before


def _driver(node: ET.Element) -> tuple[str | None, int]:
    card = _card(node)
    return card.driver, card.queues


def refusal(xml: str, wanted: Sequence[Replacement]) -> str | None:
    """Return why the cards cannot be replaced; None if no reason is known.

    Raises ValueError if the XML is invalid.
    """
    nodes = domain_xml.tree(xml, "domain").findall("devices/interface")
    counts = Counter(mac_of(node) for node in nodes)
    for card in wanted:
        if not card.mac:
            return f"{card.card} has no MAC address"
        if counts[card.mac] > 1:
            return f"{counts[card.mac]} network cards have the MAC address {card.mac}"
    return None


def source_of(element: str) -> tuple[str, str] | None:
    """Return what a card is connected to: "network" or "device", and its name. None if unknown."""
    source = ET.fromstring(element).find("source")
    if source is None:
        return None
    if network := source.get("network"):
        return "network", network
    device = source.get("bridge") or source.get("dev")
    return None if device is None else ("device", device)


def awaited(before: Sequence[GuestInterface], mac: str) -> tuple[str, ...]:
    """Return the addresses that a card must have again once it has been replaced.

    `before`: the guest's interfaces before. Returns the IPv4 addresses, or without any, the IPv6
    addresses except link-local addresses.
    """
    known = _addresses(before, mac)
    four = tuple(one for one in known if ip_interface(one).version == 4)
    return four or tuple(one for one in known if not ip_interface(one).is_link_local)


def missing(wanted: Sequence[str], now: Sequence[GuestInterface], mac: str) -> tuple[str, ...]:
    """Return the addresses in `wanted` that a card does not have yet.

    Of several IPv6 addresses, a single one is sufficient: a guest may choose new temporary ones.
    """
    known = _addresses(now, mac)
    lacks = tuple(one for one in wanted if one not in known)
    six = bool(wanted) and all(ip_interface(one).version == 6 for one in wanted)
    return () if six and len(lacks) < len(wanted) else lacks


def _addresses(interfaces: Sequence[GuestInterface], mac: str) -> list[str]:
    return [one for interface in interfaces if interface.mac == mac for one in interface.addresses]


def sharers(before: Sequence[GuestInterface], mac: str) -> tuple[str, ...]:
    """Return the guest's interfaces with this MAC address if there are several, as with a bond.

    `before`: the interfaces that the guest agent reported before the replacement. A bond or bridge
    keeps its addresses without its card, so the addresses do not prove that it uses the new card.
    """
    names = tuple(one.name for one in before if one.mac == mac)
    return names if len(names) > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReport:
    """A card that was replaced or would be replaced, and how long it had no network."""

    card: str
    mac: str
    why: str
    replaced: bool = False
    gone: Seconds | None = None
    """Time without network: from the moment when the card was unplugged until the guest agent
    reported its addresses again, or without such a report, until the card was plugged in again.
    None: the card was not replaced."""
    agent: bool = False
    """Whether a guest agent answered before the card was replaced."""
    addresses: tuple[str, ...] = ()
    """The addresses that the card had, and that it must have again."""
    missing: tuple[str, ...] = ()
    """The addresses that did not return within the time limit."""
    sharers: tuple[str, ...] = ()
    """The result of the function `sharers`."""

    @property
    def confirmed(self) -> bool | None:
        """Whether the addresses returned; None if the card was not replaced, or none were known."""
        if not (self.replaced and self.agent and self.addresses):
            return None
        return not self.missing

    def to_json(self) -> dict[str, Any]:
        """Return the report as the agent sends it."""
        return asdict(self)

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Self:
        """Parse an agent's report. Raises ValueError, TypeError, LookupError."""
        gone = told["gone"]
        if gone is not None and not 0 <= float(gone) <= _LONGEST:
            raise ValueError(f"a card was gone for {gone!r} seconds")
        lists = {
            name: tuple(str(one) for one in told[name])
            for name in ("addresses", "missing", "sharers")
        }
        return cls(
            card=str(told["card"]), mac=str(told["mac"]), why=str(told["why"]),
            replaced=bool(told["replaced"]), agent=bool(told["agent"]),
            gone=None if gone is None else Seconds(float(gone)), **lists,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "card": self.card, "mac": self.mac, "reason": self.why, "replaced": self.replaced,
            "without_network_ms": None if self.gone is None else round(self.gone * 1000),
            "guest_agent": self.agent, "addresses": list(self.addresses),
            "confirmed": self.confirmed, "missing": list(self.missing),
        }  # fmt: skip


class CardState(StrEnum):
    """The state of a card whose replacement was interrupted."""

    NOTHING = "nothing"
    """No replacement was interrupted."""
    LEFT = "left"
    """The guest has stopped or was started again since then."""
    NEW = "new"
    """The card was plugged in again with the new settings."""
    OLD = "old"
    """The card has its old settings. The guest may have been asked to release it."""
    ABSENT = "absent"
    """The card was unplugged, and is not plugged in."""


def interrupted(xml: str | None, card: Replacement) -> CardState:
    """Return the state of a card whose replacement was interrupted.

    `xml`: the guest's live XML; None if its QEMU of that time has ended. Raises ValueError if the
    XML is invalid.
    """
    if xml is None:
        return CardState.LEFT
    node = plugged(xml, card.mac)
    if node is None:
        return CardState.ABSENT
    return CardState.NEW if is_new(node, card) else CardState.OLD
