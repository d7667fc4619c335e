"""A running guest's network links."""

from xml.etree import ElementTree as ET

import libvirt

from vmckpt.hypervisor import parse
from vmckpt.hypervisor.seat import Seat


def up(seat: Seat) -> None:
    """Plug all cables in, with libvirt's knowledge. Raises HypervisorError."""

    def change(domain: libvirt.virDomain) -> None:
        for card in parse.tree(domain.XMLDesc(), "domain").findall("devices/interface"):
            link = card.find("link")
            if link is not None and link.get("state") == "down":
                link.set("state", "up")
                text = ET.tostring(card, encoding="unicode")
                domain.updateDeviceFlags(text, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    seat.on_domain("plugging the guest's cables in", change, changes=True)
