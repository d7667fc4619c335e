"""Give a copy of a guest its own host resources, so that it can run beside the original. Pure.

Used for forks and for the copies of failover tests. Only one guest at a time can use a TCP port, a
socket, a vsock address, a file that QEMU writes, or a port of a virtual switch.
"""

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from vmckpt.definition.host_resources import CHARACTER_DEVICES, QEMU

_CONSOLES = tuple(one for one in CHARACTER_DEVICES if one != "smartcard")
_HOSTLESS = ("null", "vc", "stdio", "spicevmc", "spiceport", "qemu-vdagent", "dbus")
"""Console types that use no resource of the host."""
_OF_CARDS = ("mac", "model", "driver", "address", "boot", "rom", "mtu", "alias", "acpi")
"""Elements of a network card that the guest sees; all others describe the host's side."""
_UNIQUE_CARDS = ("vhostuser", "server", "client", "udp")
"""Types of network cards whose socket or port only one guest can use."""


def isolate(root: ET.Element, suffix: str | None) -> tuple[str, ...]:
    """Replace each host resource that only one guest can use. Returns what the copy lacks.

    `suffix`: appended to the names of files and sockets; None: files are not kept, and consoles
    become pseudo-terminals. Devices that cannot be replaced stay: see `exclusive`.
    """
    lacks = []
    for kind in _CONSOLES:
        for number, console in enumerate(root.findall(f"devices/{kind}")):
            said = _console(console, suffix)
            # libvirt describes the first serial port a second time, as a console.
            if said is not None and console.find("target[@type='serial']") is None:
                lacks.append(f"{_named(console, number)} {said}")
    for screen in root.findall("devices/graphics"):
        _screen(screen)
    _others(root, suffix)
    lacks += _cards(root)
    lacks += _removed(root)
    if root.find(f"{QEMU}commandline/{QEMU}arg") is not None:
        lacks.append(
            "QEMU gets the original's additional arguments (qemu:commandline); if they name a port"
            " or a socket, QEMU cannot start beside the original"
        )
    return tuple(lacks)


def exclusive(root: ET.Element) -> Iterator[tuple[ET.Element, str]]:
    """Yield each device that only one guest can use and that cannot be replaced, with its name."""
    for node in root.findall("devices/interface"):
        source = node.find("source")
        if node.get("type") == "hostdev":
            yield node, "the host's PCI network card"
        elif node.get("type") == "vdpa":
            path = "?" if source is None else source.get("dev", "?")
            yield node, f"the vDPA device {path}"
    for node in root.findall("devices/smartcard"):
        own = node.get("mode") == "passthrough" and node.get("type") in _HOSTLESS
        if not own and node.get("mode") != "host-certificates":
            yield node, "the host's smart card reader"
    for node in root.findall("devices/input[@type='passthrough']"):
        yield node, "the host's input device"


def unplug(card: ET.Element) -> None:
    """Disconnect a network card from the host's side, and take down its link."""
    card.set("type", "ethernet")
    card.attrib.pop("managed", None)
    for node in list(card):
        if node.tag not in _OF_CARDS:
            card.remove(node)
    ET.SubElement(card, "link").set("state", "down")


def _named(console: ET.Element, number: int) -> str:
    if console.tag == "redirdev":
        return f"the USB redirection {number}"
    if console.tag == "channel":
        target = console.find("target")
        return f"channel {'?' if target is None else target.get('name') or number}"
    return f"{console.tag} port {number}"


def _console(console: ET.Element, suffix: str | None) -> str | None:
    """Give a console its own file or socket, or make it a pseudo-terminal.

    Returns a description of the change if the copy's console is not of the original's kind.
    """
    for log in console.findall("log"):
        if suffix is None or not log.get("file"):
            console.remove(log)
        else:
            log.set("file", f"{log.get('file')}.{suffix}")
    kind, source, target = console.get("type"), console.find("source"), console.find("target")
    if kind in _HOSTLESS:
        return None
    path = None if source is None else source.get("path")
    binds = kind == "unix" and source is not None and source.get("mode") != "connect"
    if suffix is not None and path is not None and (binds or kind == "file"):
        if path == "/dev/null":
            return None
        if source is not None and not path.startswith("/dev/"):
            source.set("path", f"{path}.{suffix}")
            return None
    for node in console.findall("source") + console.findall("protocol"):
        console.remove(node)
    if kind == "unix" and console.tag == "channel" and target is not None and target.get("name"):
        ET.SubElement(console, "source").set("mode", "bind")  # libvirt chooses the path
        return None if binds or path is None else f"is a new socket; {path} stays with the original"
    console.attrib.pop("tty", None)
    console.set("type", "pty")
    return None if kind == "pty" else _changed(kind, source)


def _changed(kind: str | None, source: ET.Element | None) -> str:
    given = {} if source is None else source.attrib
    port = ":".join(word for key in ("host", "service") if (word := given.get(key)))
    what = given.get("path") or port or "the host's side"
    return f"is a pseudo-terminal; {what} ({kind}) stays with the original"


def _screen(screen: ET.Element) -> None:
    """Let libvirt choose a screen's ports and sockets."""
    has_websocket = "websocket" in screen.attrib
    for key in ("port", "tlsPort", "websocket", "socket"):
        screen.attrib.pop(key, None)
    if screen.get("type") == "dbus":
        screen.attrib.pop("address", None)
    for listen in screen.findall("listen"):
        listen.attrib.pop("socket", None)
    if screen.get("type") in ("vnc", "spice", "rdp"):
        screen.set("autoport", "yes")
    if has_websocket:
        screen.set("websocket", "-1")


def _others(root: ET.Element, suffix: str | None) -> None:
    for audio in root.findall("devices/audio[@type='file'][@path]"):
        if suffix is None:
            audio.set("type", "none")
            del audio.attrib["path"]
        else:
            audio.set("path", f"{audio.get('path')}.{suffix}")
    for cid in root.findall("devices/vsock/cid"):
        cid.set("auto", "yes")
        cid.attrib.pop("address", None)
    for pstore in root.findall("devices/pstore"):
        for path in pstore.findall("path"):
            pstore.remove(path)  # libvirt's default path contains the guest's name


def _cards(root: ET.Element) -> Iterator[str]:
    for number, card in enumerate(root.findall("devices/interface")):
        source, kind = card.find("source"), card.get("type")
        port = card.find("virtualport")
        midonet = port is not None and port.get("type") == "midonet"
        if kind in _UNIQUE_CARDS or midonet:
            what = "" if source is None else source.get("path") or source.get("port") or ""
            unplug(card)
            only = f"{kind} {what}".rstrip() if not midonet else "the MidoNet port"
            yield f"network card {number} is not connected; {only} stays with the original"
            continue
        if source is not None:
            source.attrib.pop("portid", None)
        # The switch identifies the port by these; libvirt generates new ones.
        for parameters in card.findall("virtualport/parameters"):
            for key in ("interfaceid", "instanceid"):
                parameters.attrib.pop(key, None)
        for backend in card.findall("backend[@logFile]"):
            del backend.attrib["logFile"]
        if forwards := card.findall("portForward"):
            for forward in forwards:
                card.remove(forward)
            yield f"network card {number} forwards no ports; these stay with the original"


def _removed(root: ET.Element) -> Iterator[str]:
    """Remove host resources that the guest does not see. Yields a sentence on each loss.

    As the guest does not see them, they may also be missing in the copy of a running guest.
    """
    devices = root.find("devices")
    if devices is None:
        return
    for node in devices.findall("lease"):
        devices.remove(node)
        yield f"there is no lease {node.findtext('key', '?')}; it stays with the original"
    for node in devices.findall("input[@type='evdev']"):
        devices.remove(node)
        yield "there is no input from the host's devices (evdev)"
    for backend in devices.findall("rng/backend[@model='egd']"):
        if backend.find("source[@mode='bind']") is not None:
            for child in list(backend):
                backend.remove(child)
            backend.attrib.clear()
            backend.set("model", "random")
            backend.text = "/dev/urandom"
