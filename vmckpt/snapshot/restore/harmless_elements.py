"""Elements of a domain definition that are known to be harmless to the host. Pure.

All other elements are refused: each version of libvirt adds new elements, and a dishonest host can
write any of them into a definition. Names are those of libvirt's domain schema
(formatdomain.html, libvirt 11).
"""

from collections.abc import Iterator, Mapping
from xml.etree import ElementTree as ET

_ANY = frozenset({"*"})
_WHOLE = """
name uuid genid title description metadata memory currentMemory maxMemory vcpu vcpus iothreads
iothreadids defaultiothread cputune numatune memtune blkiotune memoryBacking features cpu clock
on_poweroff on_reboot on_crash on_lockfailure pm perf keywrap launchSecurity bootloader_args
os/type os/boot os/bootmenu os/bios os/smbios os/firmware os/cmdline seclabel/label
seclabel/imagelabel seclabel/baselabel devices/*/alias devices/*/address devices/*/boot
devices/*/acpi devices/controller devices/memballoon devices/watchdog devices/panic devices/vsock
devices/iommu devices/crypto devices/hub devices/nvram devices/video devices/sound
devices/disk/driver devices/disk/target devices/disk/iotune devices/disk/readonly
devices/disk/shareable devices/disk/transient devices/disk/serial devices/disk/wwn
devices/disk/vendor devices/disk/product devices/disk/geometry devices/disk/blockio
devices/disk/throttlefilters devices/disk/source/slices devices/disk/source/format
devices/disk/backingStore/format devices/interface/mac devices/interface/model
devices/interface/driver devices/interface/target devices/interface/link devices/interface/mtu
devices/interface/bandwidth devices/interface/filterref devices/interface/virtualport
devices/interface/vlan devices/interface/coalesce devices/interface/guest devices/interface/ip
devices/interface/route devices/interface/teaming devices/interface/port devices/interface/tune
devices/interface/rom devices/interface/script devices/interface/downscript
devices/graphics/channel devices/graphics/image devices/graphics/jpeg devices/graphics/zlib
devices/graphics/playback devices/graphics/streaming devices/graphics/clipboard
devices/graphics/mouse devices/graphics/filetransfer devices/graphics/audio devices/graphics/gl
devices/audio/input devices/audio/output devices/serial/target devices/serial/protocol
devices/serial/model devices/console/target devices/console/protocol devices/parallel/target
devices/parallel/protocol devices/channel/target devices/channel/protocol
devices/redirdev/protocol devices/rng/rate devices/memory/target devices/memory/uuid
devices/tpm/backend/active_pcr_banks devices/filesystem/target devices/filesystem/readonly
devices/filesystem/space_hard_limit devices/filesystem/space_soft_limit devices/redirfilter
devices/emulator devices/hostdev
"""
"""Elements allowed with everything in them except paths. `xml_safety` checks programs and devices
of the host."""

_SOME = {
    "": "type id", "resource": "", "resource/partition": "", "os": "firmware", "devices": "",
    "os/loader": "readonly secure type format stateless", "os/nvram": "template format type"
    " templateFormat", "os/nvram/source": "file", "os/nvram/format": "type", "os/kernel": "",
    "os/initrd": "", "os/dtb": "", "sysinfo": "type", "sysinfo/*": "", "sysinfo/*/entry": "name",
    "seclabel": "type model relabel",
    "devices/disk": "type device snapshot model", "devices/disk/mirror": "",
    "devices/disk/source": "file dev dir startupPolicy index",
    "devices/disk/source/seclabel": "model relabel labelskip",
    "devices/disk/backingStore": "type index", "devices/disk/backingStore/source": "file dev index",
    "devices/interface": "type trustGuestRxFilters managed",
    "devices/interface/source": "network portgroup bridge dev mode portid",
    "devices/interface/backend": "type tap vhost",
    "devices/graphics": "*", "devices/graphics/listen": "type address network socket",
    "devices/audio": "*", "devices/input": "type bus model", "devices/input/driver": "*",
    "devices/input/source": "", "devices/redirdev": "type bus", "devices/redirdev/source": "*",
    "devices/rng": "model", "devices/rng/backend": "model", "devices/rng/driver": "*",
    "devices/memory": "model access discard", "devices/memory/source": "",
    "devices/memory/source/path": "", "devices/memory/source/pagesize": "unit",
    "devices/memory/source/nodemask": "", "devices/memory/source/alignsize": "unit",
    "devices/memory/source/pmem": "", "devices/tpm": "model", "devices/pstore": "backend",
    "devices/pstore/path": "", "devices/pstore/size": "unit",
    "devices/tpm/backend": "type version persistent_state debug profile",
    "devices/tpm/backend/source": "type path",
    "devices/filesystem": "type accessmode fmode dmode multidevs model",
    "devices/filesystem/driver": "type format wrpolicy queue",
    "devices/filesystem/source": "dir file socket",
    **{
        name: "*"
        for kind in ("serial", "console", "parallel", "channel")
        for name in (f"devices/{kind}", f"devices/{kind}/source", f"devices/{kind}/log")
    },
}  # fmt: skip
"""Elements allowed with these attributes; their children are checked separately."""

_KINDS: Mapping[str, frozenset[str]] = {
    "": frozenset({"kvm", "qemu", ""}),
    "sysinfo": frozenset({"smbios"}),
    "devices/disk": frozenset({"file", "block", "dir"}),
    "devices/disk/backingStore": frozenset({"file", "block", ""}),
    "devices/interface": frozenset({"network", "bridge", "direct", "user", "ethernet", "null"}),
    "devices/input": frozenset({"mouse", "tablet", "keyboard"}),
    "devices/tpm/backend": frozenset({"emulator"}),
    "devices/redirdev": frozenset({"spicevmc", "pty"}),
    "devices/filesystem": frozenset({"mount", "file", ""}),
}
"""Allowed values of an element's `type`."""
_READ = ("/usr/share/", "/usr/lib/ipxe/", "/dev/dri/render", "/dev/pts/", "/machine")
"""Paths that every guest may use: firmware and ROMs of the host, render nodes of graphics cards,
pseudo-terminals (created for each guest), and libvirt's resource partition."""
_DEVICES = frozenset({
    "/dev/urandom", "/dev/random", "/dev/hwrng", "/dev/net/tun", "/dev/vhost-net",
})  # fmt: skip
_NO_PATHS = frozenset({
    "metadata", "title", "description", "name", "os/cmdline", "sysinfo", "seclabel",
    "devices/disk/serial", "devices/emulator", "devices/hostdev", "devices/interface/script",
    "devices/interface/downscript",
})  # fmt: skip
"""Elements in which text that begins with a slash is not a path, or is checked by `xml_safety`."""


def unknown(root: ET.Element, *, but: frozenset[str]) -> Iterator[str]:
    """Yield a reason for each element, attribute or type that is not known to be harmless.

    `but` are elements that the guest already has on this host, in the form that `written` returns.
    """
    yield from _unknown(root, "", but)


def paths(root: ET.Element) -> Iterator[tuple[str, str]]:
    """Yield the element and the path for each path of the host that must be checked."""
    for name, node in _elements(root, ""):
        parts = name.split("/")
        if not _NO_PATHS.isdisjoint("/".join(parts[:end]) for end in range(1, len(parts) + 1)):
            continue
        for text in (*node.attrib.values(), (node.text or "").strip()):
            if text.startswith("/") and not _everywhere(text):
                yield name, text


def _everywhere(path: str) -> bool:
    return path in _DEVICES or (path.startswith(_READ) and "/../" not in path)


def written(node: ET.Element) -> str:
    """Return an element as normalised text, so that equal elements have equal text."""
    own = sorted(node.attrib.items())
    return f"{node.tag} {own} {(node.text or '').strip()} {[written(child) for child in node]}"


def _elements(node: ET.Element, name: str) -> Iterator[tuple[str, ET.Element]]:
    for child in node:
        inside = f"{name}/{child.tag}".lstrip("/")
        yield inside, child
        yield from _elements(child, inside)


def _unknown(node: ET.Element, name: str, but: frozenset[str]) -> Iterator[str]:
    if name in _KNOWN_WHOLE or written(node) in but:
        return
    allowed = _allowed(name)
    if allowed is None:
        yield f"<{name}> is not known to be harmless"
        return
    kind = node.get("type", "")
    if name in _KINDS and kind not in _KINDS[name]:
        yield f"<{name} type={kind!r}> is not known to be harmless"
        return
    for attribute in sorted(node.attrib):
        if "*" not in allowed and attribute not in allowed:
            yield f"<{name} {attribute}={node.get(attribute)!r}> is not known to be harmless"
    for child in node:
        if not child.tag.startswith("{"):
            yield from _unknown(child, f"{name}/{child.tag}".lstrip("/"), but)


def _allowed(name: str) -> frozenset[str] | None:
    """Return the attributes that an element may have; None if the element is not allowed."""
    general = "/".join((*name.split("/")[:1], "*", *name.split("/")[2:]))
    if general in _KNOWN_WHOLE:
        return _ANY
    # The backing file of a backing file is treated like a backing file.
    deeper = name
    while "backingStore/backingStore" in deeper:
        deeper = deeper.replace("backingStore/backingStore", "backingStore")
    if deeper in _KNOWN_WHOLE:
        return _ANY
    for one in (deeper, general):
        if one in _KNOWN:
            return _KNOWN[one]
    return None


_KNOWN_WHOLE = frozenset(_WHOLE.split())
_KNOWN = {name: frozenset(attributes.split()) for name, attributes in _SOME.items()}
