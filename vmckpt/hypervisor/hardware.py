"""The virtual hardware that a definition describes, in a canonical form. Pure.

Two definitions of one guest differ in many ways that the guest does not see: the XML of a running
guest has aliases, host devices and expanded CPU features, and the XML for a restore omits default
devices. The canonical form contains only what the guest sees, so it can be compared.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from vmckpt.definition.elements import attribute
from vmckpt.hypervisor import domain_xml

_NOT_COMPARED = frozenset({"alias", "seclabel", "source", "log", "backend", "backingStore"})
_GUEST_SEES = frozenset({
    "type", "queues", "queue_size", "rx_queue_size", "tx_queue_size", "iommu", "ats", "packed",
    "page_per_vq", "event_idx", "intremap", "caching_mode", "eim", "iotlb", "aw_bits",
})  # fmt: skip
"""Attributes of <driver> that change what the guest sees; the others describe the host's side."""
_FILLED_IN = ("address", "mtu", "target")
"""Elements that libvirt fills in; compared only if both definitions have them."""
_SOURCES = ("file", "dev", "name", "volume", "dir", "network", "bridge")
_ANY_MODE = ("host-passthrough", "maximum")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the hardware. Equality is decided by `same`."""

    value: str
    filled_in: Mapping[str, str] = field(default_factory=dict)
    """Elements that are compared only if both parts have them."""
    implicit: bool = False
    """Whether libvirt omits the part from some forms of a definition."""


def differs(first: str, second: str, *, identity: bool = True) -> tuple[str, ...]:
    """Return the names of the parts in which two definitions describe different hardware.

    With `identity`, MAC addresses, fixed vsock addresses, the SMBIOS UUID, and host resources of
    disks and network cards are compared, too. Raises ValueError.
    """
    roots = [domain_xml.tree(one, "domain") for one in (first, second)]
    one, other = (dict(parts(root, identity=identity)) for root in roots)
    known = [*one, *(name for name in other if name not in one)]
    found = [name for name in known if not same(one.get(name), other.get(name))]
    if not _same_cpu(*roots):
        found.append("CPU")
    return tuple(found)


def same(one: Part | None, other: Part | None) -> bool:
    """Return whether two parts are the same hardware; None: the part is missing."""
    if one is None or other is None:
        there = one or other
        return there is None or there.implicit
    both = one.filled_in.keys() & other.filled_in.keys()
    return one.value == other.value and all(one.filled_in[k] == other.filled_in[k] for k in both)


def parts(root: ET.Element, *, identity: bool = True) -> Iterator[tuple[str, Part]]:
    """Yield the name and content of each part. See `differs` for `identity`. Raises ValueError."""
    guest = domain_xml.guest(
        ET.tostring(root, encoding="unicode"),
        state=5, persistent=True, autostart=False, snapshots=0, job=None,
    )  # fmt: skip
    yield "machine", Part(f"{guest.accelerator} {guest.arch} {guest.machine}")
    yield "memory", Part(f"{guest.memory} {_whole(root.find('maxMemory'))}")
    yield "processors", Part(str(guest.vcpus))
    yield "firmware", Part(" ".join(guest.boot_files))
    yield "boot order", Part(" ".join(one.get("dev", "") for one in root.findall("os/boot")))
    yield "features", Part(_features(root.find("features")))
    yield "clock", Part(_clock(root.find("clock")))
    yield "SMBIOS", Part(_smbios(root, identity=identity))
    seen = Counter[str]()
    for kind, name_of, content in _DEVICES:
        for number, node in enumerate(root.findall(f"devices/{kind}")):
            if (part := content(node, identity)) is not None:
                name = name_of(node, number)
                seen[name] += 1
                yield name if seen[name] == 1 else f"{name} ({seen[name]})", part


def _whole(node: ET.Element | None, but: Collection[str] = _NOT_COMPARED) -> str:
    """Return an element as text that does not depend on the order of attributes and children.

    `but`: names of descendants to leave out. Returns "" if nothing in the element is compared.
    """
    if node is None:
        return ""
    own = sorted(node.attrib.items())
    if node.tag == "driver":
        own = [(key, value) for key, value in own if key in _GUEST_SEES]
    inside = sorted(text for child in node if child.tag not in but and (text := _whole(child, but)))
    text = (node.text or "").strip()
    # An element that says nothing of the hardware is like none.
    return f"{node.tag}{own}{text}{inside}" if own or text or inside or not len(node) else ""


def _device(node: ET.Element, attributes: Collection[str], children: Collection[str] = ()) -> Part:
    """Return the part for a device: given attributes and children, and what libvirt fills in."""
    own = [f"{key}={node.get(key)}" for key in sorted(attributes) if node.get(key) is not None]
    inside = [
        _whole(child)
        for tag in ("driver", "boot", "acpi", *children)
        for child in node.findall(tag)
        if tag != "driver" or _GUEST_SEES & child.attrib.keys()
    ]
    filled = {
        tag: _whole(child)
        for tag in _FILLED_IN
        if tag not in children and (child := node.find(tag)) is not None
    }
    return Part(" ".join([*own, *sorted(inside)]), filled)


def _of(node: ET.Element, child: str, name: str) -> str:
    return attribute(node, child, name) or ""


def _from(node: ET.Element) -> str:
    source = node.find("source")
    if source is None:
        return ""
    return next((value for key in _SOURCES if (value := source.get(key))), "")


def _disk(node: ET.Element, identity: bool) -> Part:
    seen = ("serial", "wwn", "vendor", "product", "readonly", "blockio", "geometry")
    part = _device(node, ("model",), seen)
    if node.find("source") is None:
        part = Part(node.get("model", ""), part.filled_in)  # an empty drive
    target = node.find("target")
    bus = {} if target is None else {
        key: target.get(key) for key in ("bus", "removable", "rotation_rate") if target.get(key)
    }  # fmt: skip
    filled = {key: value for key, value in part.filled_in.items() if key == "address"}
    where = _from(node) if identity else ""
    return Part(f"{node.get('device', 'disk')} {where} {bus} {part.value}", filled)


def _card(node: ET.Element, identity: bool) -> Part:
    part = _device(node, (), ("rom",))
    own = f"{_of(node, 'mac', 'address')} {_from(node)}" if identity else ""
    filled = {key: value for key, value in part.filled_in.items() if key != "target"}
    return Part(f"{own} {_of(node, 'model', 'type')} {part.value}", filled)


def _controller(node: ET.Element, _: bool) -> Part:
    part = _device(node, ("model", "ports", "vectors", "maxEventChannels"), ("pcihole64",))
    kind, index, model = node.get("type"), node.get("index"), node.get("model")
    root = kind == "pci" and index == "0"
    usb = kind == "usb" and index == "0" and model in (None, "piix3-uhci")
    return Part(part.value, part.filled_in, implicit=root or usb)


def _video(node: ET.Element, _: bool) -> Part:
    return _device(node, (), ("model",))


def _input(node: ET.Element, _: bool) -> Part | None:
    if node.get("bus") == "ps2" or node.get("type") == "evdev":
        return None  # PS/2 devices are part of the machine
    return _device(node, ("type", "bus", "model"))


def _port(node: ET.Element, _: bool) -> Part | None:
    target = node.find("target")
    if node.tag == "console" and (target is None or target.get("type", "serial") == "serial"):
        return None  # another name of the first serial port
    seen = {} if target is None else {
        key: value for key, value in target.attrib.items() if key in ("type", "port", "name")
    }  # fmt: skip
    if node.tag != "channel" and "port" in seen:
        del seen["port"]  # the number of the device, which may be omitted
    model = "" if target is None else _of(target, "model", "name")
    address = node.find("address")
    filled = {"address": _whole(address)} if address is not None else {}
    if model:
        filled["model"] = model
    return Part(f"{sorted(seen.items())}", filled)


def _tpm(node: ET.Element, _: bool) -> Part:
    backend = node.find("backend")
    kind = "" if backend is None else f"{backend.get('type')} {backend.get('version', '')}"
    return Part(f"{node.get('model', '')} {kind}")


def _vsock(node: ET.Element, identity: bool) -> Part:
    fixed = _of(node, "cid", "auto") == "no" and identity
    return Part(f"{node.get('model', '')} {_of(node, 'cid', 'address') if fixed else ''}")


def _dimm(node: ET.Element, _: bool) -> Part:
    size, group = node.find("target/size"), node.find("target/node")
    seen = [*(("model", node.get("model", "")),),
            *((one.tag, one.text) for one in (size, group) if one is not None)]  # fmt: skip
    return Part(str(seen))


def _simple(*attributes: str, children: Collection[str] = ()) -> "_Content":
    def content(node: ET.Element, _: bool) -> Part:
        return _device(node, attributes, children)

    return content


_Content = Callable[[ET.Element, bool], Part | None]
_Name = Callable[[ET.Element, int], str]


def _numbered(text: str) -> _Name:
    return lambda _, number: f"{text} {number}"


_DEVICES: tuple[tuple[str, _Name, _Content], ...] = (
    ("disk", lambda node, _: f"disk {_of(node, 'target', 'dev')}", _disk),
    ("interface", _numbered("network card"), _card),
    ("controller", lambda node, _: f"controller {node.get('type')} {node.get('index', '0')}",
     _controller),
    ("video", _numbered("video"), _video),
    ("sound", _numbered("sound"), _simple("model", children=("codec",))),
    ("input", lambda node, _: f"input {node.get('type')} {node.get('bus', '')}", _input),
    ("serial", _numbered("serial port"), _port),
    ("console", _numbered("console"), _port),
    ("parallel", _numbered("parallel port"), _port),
    ("channel", lambda node, number: f"channel {_of(node, 'target', 'name') or number}", _port),
    ("hostdev", _numbered("hostdev"), _simple("mode", "type", "model")),
    ("tpm", lambda *_: "tpm", _tpm),
    ("filesystem", lambda node, _: f"filesystem {_of(node, 'target', 'dir')}",
     _simple("type", "model", children=("readonly",))),
    ("watchdog", _numbered("watchdog"), _simple("model", "action")),
    ("rng", _numbered("rng"), _simple("model")),
    ("shmem", lambda node, _: f"shmem {node.get('name')}", _simple(children=("model", "size"))),
    ("vsock", lambda *_: "vsock", _vsock),
    ("memory", _numbered("memory device"), _dimm),
    ("memballoon", lambda *_: "memballoon",
     _simple("model", "autodeflate", "freePageReporting")),
    ("panic", _numbered("panic device"), _simple("model")),
    ("redirdev", _numbered("USB redirection"), _simple("bus")),
    ("hub", _numbered("hub"), _simple("type")),
    ("smartcard", _numbered("smart card"), _simple("mode")),
    ("iommu", lambda *_: "iommu", _simple("model")),
    ("crypto", _numbered("crypto device"), _simple("model", "type")),
    ("pstore", lambda *_: "pstore", _simple("backend", children=("size",))),
)  # fmt: skip


def _features(node: ET.Element | None) -> str:
    found = []
    for child in () if node is None else node:
        if child.tag in ("hyperv", "kvm", "xen"):
            passed = child.get("mode") == "passthrough"  # expanded while the guest runs
            on = [] if passed else [_whole(one) for one in child if one.get("state") != "off"]
            if passed or on:
                found.append(f"{child.tag} {child.get('mode', 'custom')} {sorted(on)}")
        else:
            found.append(_whole(child))
    return " ".join(sorted(found))


def _clock(node: ET.Element | None) -> str:
    if node is None:
        return "utc"
    timers = sorted(
        f"{one.get('name')} {one.get('present', '')} {one.get('tickpolicy', '')}"
        for one in node.findall("timer")
    )
    return f"{node.get('offset', 'utc')} {timers}" if timers else node.get("offset", "utc")


def _smbios(root: ET.Element, *, identity: bool) -> str:
    found = [_of(root, "os/smbios", "mode")]
    found += [
        f"{entry.get('name')}={(entry.text or '').strip()}"
        for entry in root.findall("sysinfo[@type='smbios']/*/entry")
        if identity or entry.get("name") != "uuid"
    ]
    return " ".join(sorted(found)).strip()


def _same_cpu(one: ET.Element, other: ET.Element) -> bool:
    """Return whether the CPUs of two domains may be the same, as far as the definitions show.

    libvirt shows an expanded CPU model for a running guest.
    """
    first, second = one.find("cpu"), other.find("cpu")
    modes = [_mode(first), _mode(second)]
    if modes[0] != modes[1] and any(mode in _ANY_MODE for mode in modes):
        return False
    given = [root.find("cpu/topology") is not None for root in (one, other)]
    if any(given) and _topology(one) != _topology(other):
        return False
    if _cells(first) != _cells(second):
        return False
    if first is None or second is None or modes != ["custom", "custom"]:
        return True  # a default, or a model that the host chooses
    if (first.findtext("model") or "").strip() != (second.findtext("model") or "").strip():
        return False
    return _allows(first, second) and _allows(second, first)


def _mode(cpu: ET.Element | None) -> str:
    return "custom" if cpu is None else cpu.get("mode", "custom")


def _topology(root: ET.Element) -> tuple[str, ...]:
    node = root.find("cpu/topology")
    if node is None:
        return (root.findtext("vcpu", "1").strip(), "1", "1", "1", "1")
    keys = ("sockets", "dies", "clusters", "cores", "threads")
    return tuple(node.get(key, "1") for key in keys)


def _cells(cpu: ET.Element | None) -> list[str]:
    cells = [] if cpu is None else cpu.findall("numa/cell")
    keys = ("id", "cpus", "memory", "unit")
    return [" ".join(cell.get(key, "") for key in keys) for cell in cells]


_ON = {"require": True, "force": True, "disable": False, "forbid": False}


def _allows(cpu: ET.Element, other: ET.Element) -> bool:
    """Return whether `other` has the explicit features of `cpu`.

    libvirt lists all features of a running guest's CPU (check='full'), and only some in a stored
    definition. If only `cpu` is a full list, features that `other` does not mention are ignored.
    """
    there = {
        one.get("name"): _ON.get(one.get("policy", "require")) for one in other.iter("feature")
    }
    for one in cpu.iter("feature"):
        wanted, found = _ON.get(one.get("policy", "require")), there.get(one.get("name"))
        if wanted is None or found == wanted:
            continue
        expanded = cpu.get("check") == "full" and other.get("check") != "full"
        if found is not None or not expanded:
            return False
    return True
