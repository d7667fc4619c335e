"""A guest that is started on images which are still empty: its description."""

from xml.etree import ElementTree as ET

import pytest

from tests.support.guest_xml import XML
from vmckpt.capture.disks import lazy_overlay


def test_a_guest_is_started_on_what_is_behind_its_empty_images() -> None:
    sockets = {"vda": "/run/x/vda.nbd"}
    told = lazy_overlay.behind(XML, sockets)
    disk = ET.fromstring(told).find("devices/disk")
    assert disk is not None
    driver = disk.find("driver")
    assert driver is not None
    assert (driver.get("error_policy"), driver.get("rerror_policy")) == ("stop", "stop")
    stores = disk.findall("backingStore")
    assert [one.get("type") for one in stores] == ["network"]
    assert lazy_overlay.waiting(told, sockets) == {"vda"}
    assert lazy_overlay.waiting(told, {"vda": "/run/y/vda.nbd"}) == frozenset()
    assert lazy_overlay.waiting(XML, sockets) == frozenset()
    with pytest.raises(ValueError, match="no disk vdb"):
        lazy_overlay.behind(XML, {"vdb": "/run/x/vdb.nbd"})
