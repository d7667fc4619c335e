"""Host resources of a copy that runs beside its original."""

from xml.etree import ElementTree as ET

import pytest

from tests.support import foreign
from vmckpt.definition import own_resources

FIXED = foreign.text("fork-all-resources-fixed")
UNIQUE = (
    "4555", "web1.console'", "web1.log'", "web1.serial'", "/run/logger", "ttyS0", "web1.pipe",
    "514", "pts/4", "agent.sock'", "/run/licence", "4000", "590", "5705", "/run/s", "dbus-web1",
    "web1.wav'", "42", "/var/lib/p<", "somearea", "event1", "vhost1", "5558", "09b11c53", "passt'/",
    "2022", "portid",
)  # fmt: skip


def isolated(suffix: str | None) -> tuple[ET.Element, tuple[str, ...]]:
    root = ET.fromstring(FIXED)
    return root, own_resources.isolate(root, suffix)


@pytest.mark.parametrize("suffix", ["1a2b3c4d", None])
def test_a_copy_names_nothing_that_only_one_guest_can_use(suffix: str | None) -> None:
    before, after = FIXED, ET.tostring(isolated(suffix)[0], encoding="unicode").replace('"', "'")
    assert [one for one in UNIQUE if one not in before and one not in ("passt'/",)] == []
    assert [one for one in UNIQUE if one in after] == []


def test_a_fork_keeps_kinds_of_consoles_under_other_names() -> None:
    root, _ = isolated("1a2b3c4d")
    paths = [one.get("path") for one in root.findall("devices/serial/source")]
    assert paths == [
        "/var/log/web1.console.1a2b3c4d", "/run/web1.serial.1a2b3c4d", "/dev/null",
    ]  # fmt: skip
    assert root.find("devices/serial/log[@file='/var/log/web1.log.1a2b3c4d']") is not None
    kinds = [one.get("type") for one in root.findall("devices/serial")]
    assert kinds == ["pty", "file", "unix", "pty", "pty", "pty", "pty", "pty", "file"]
    assert root.find("devices/audio[@path='/srv/web1.wav.1a2b3c4d']") is not None
    agent, licence = root.findall("devices/channel/source")
    assert agent.get("path") == "/run/agent.sock.1a2b3c4d"
    assert licence.attrib == {"mode": "bind"}


def test_the_copy_of_a_test_leaves_no_files() -> None:
    root, _ = isolated(None)
    serials = root.findall("devices/serial")
    assert {one.get("type") for one in serials} == {"pty"}
    assert root.findall("devices/*/log") == []
    assert root.find("devices/audio[@type='none']") is not None


def test_what_the_copy_lacks_is_named_once() -> None:
    said = isolated("1a2b3c4d")[1]
    assert said == (
        "serial port 0 is a pseudo-terminal; 0.0.0.0:4555 (tcp) stays with the original",
        "serial port 3 is a pseudo-terminal; /run/logger (unix) stays with the original",
        "serial port 4 is a pseudo-terminal; /dev/ttyS0 (dev) stays with the original",
        "serial port 5 is a pseudo-terminal; /run/web1.pipe (pipe) stays with the original",
        "serial port 6 is a pseudo-terminal; h:5140 (udp) stays with the original",
        "channel licence is a new socket; /run/licence stays with the original",
        "the USB redirection 0 is a pseudo-terminal; h:4000 (tcp) stays with the original",
        "network card 0 is not connected; vhostuser /run/vhost1 stays with the original",
        "network card 1 is not connected; server 5558 stays with the original",
        "network card 3 forwards no ports; these stay with the original",
        "there is no lease web1; it stays with the original",
        "there is no input from the host's devices (evdev)",
        "QEMU gets the original's additional arguments (qemu:commandline); if they name a port or a"
        " socket, QEMU cannot start beside the original",
    )


def test_screens_ports_are_chosen_by_libvirt() -> None:
    vnc, spice, _ = isolated("1a2b3c4d")[0].findall("devices/graphics")
    assert vnc.attrib == {
        "type": "vnc", "autoport": "yes", "websocket": "-1", "listen": "0.0.0.0",
    }  # fmt: skip
    assert spice.attrib == {"type": "spice", "autoport": "yes"}
    assert spice.find("listen[@type='socket']") is not None


def test_cards_keep_what_the_guest_sees() -> None:
    cards = isolated("1a2b3c4d")[0].findall("devices/interface")
    assert [one.get("type") for one in cards] == ["ethernet", "ethernet", "bridge", "user",
                                                  "network"]  # fmt: skip
    assert cards[0].find("mac[@address='52:54:00:00:00:01']") is not None
    assert cards[0].find("link[@state='down']") is not None
    assert cards[2].find("virtualport/parameters[@profileid='p']") is not None


@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("<interface type='hostdev'/>", "the host's PCI network card"),
        ("<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface>",
         "the vDPA device /dev/vhost-vdpa-0"),
        ("<smartcard mode='host'/>", "the host's smart card reader"),
        ("<smartcard mode='passthrough' type='tcp'/>", "the host's smart card reader"),
        ("<smartcard mode='passthrough' type='spicevmc'/>", None),
        ("<input type='passthrough'/>", "the host's input device"),
        ("<interface type='bridge'/>", None),
    ],
)  # fmt: skip
def test_devices_that_cannot_be_replaced(device: str, what: str | None) -> None:
    root = ET.fromstring(f"<domain><devices>{device}</devices></domain>")
    assert [name for _, name in own_resources.exclusive(root)] == ([] if what is None else [what])


@pytest.mark.parametrize(
    "device",
    ["", "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>",
     "<serial type='pty'/><interface type='network'><source network='default'/></interface>"],
)  # fmt: skip
def test_an_ordinary_guest_lacks_nothing(device: str) -> None:
    root = ET.fromstring(f"<domain><name>x</name><devices>{device}</devices></domain>")
    assert own_resources.isolate(root, "1") == ()
