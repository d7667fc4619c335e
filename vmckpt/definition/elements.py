"""Read elements of a domain XML. Pure."""

from xml.etree import ElementTree as ET


def attribute(node: ET.Element, child: str, name: str) -> str | None:
    """Return an attribute of a child element; None if the child or the attribute is missing."""
    found = node.find(child)
    return None if found is None else found.get(name)


def mac_of(card: ET.Element) -> str:
    """Return the MAC address of an interface element in lower case; empty if it has none."""
    return (attribute(card, "mac", "address") or "").lower()
