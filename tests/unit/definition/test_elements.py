from xml.etree import ElementTree as ET

from vmckpt.definition.elements import attribute, mac_of

CARD = ET.fromstring("<interface><mac address='52:54:00:AA:00:01'/><model/></interface>")


def test_an_attribute_of_a_child_may_be_missing_in_two_ways() -> None:
    assert attribute(CARD, "mac", "address") == "52:54:00:AA:00:01"
    assert attribute(CARD, "model", "type") is None
    assert attribute(CARD, "source", "dev") is None


def test_a_mac_address_is_in_lower_case_or_empty() -> None:
    assert mac_of(CARD) == "52:54:00:aa:00:01"
    assert mac_of(ET.fromstring("<interface/>")) == ""
