"""Add the settings for fast snapshots and replication to a guest's definition. Pure.

Only the persistent definition is changed. A running guest must be restarted to use the changes.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from vmckpt.capture.device_limits import (
    CARDS_OUTSIDE,
    NOT_REPLICATED,
    kinds,
    not_replicated,
    wants_vhost,
)
from vmckpt.definition.elements import mac_of
from vmckpt.hypervisor import definition_text, domain_xml
from vmckpt.model.disk import DiskFacts
from vmckpt.model.finding import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The changed definition, and the findings."""

    xml: str | None
    """The new definition; None: no change is necessary."""
    findings: tuple[Finding, ...]
    restart: bool
    """Whether the guest is running without a required setting; a restart applies all settings."""


def prepare(
    stored: str,
    running: ET.Element | None,
    disks: Sequence[DiskFacts] = (),
    *,
    finds_writes: bool = False,
) -> Prepared:
    """Compare a definition with the required settings, and return the changed definition.

    `stored`: the persistent definition; `running`: the live definition, None if the guest is off;
    `disks`: facts about the guest's disks, for the findings; `finds_writes`: whether the host's
    kernel is known to find the pages that a guest writes, so that memory need not be shared. Raises
    ValueError or ParseError if `stored` is not the XML of a domain.
    """
    root = domain_xml.tree(stored, "domain")
    name = root.findtext("name", "?")
    findings: list[Finding] = []
    changed = False
    parts = _PARTS if finds_writes else (_Memory(), *_PARTS)
    if finds_writes:
        findings.append(_any_memory(root, name))
    for part in parts:
        wanted = part.change(root)
        changed |= wanted
        waits = running is not None and part.lacking(running)
        findings.append(_told(part, name, wanted=wanted, waits=waits))
    findings += _folder(root, name)
    findings += _unplugged(root, running, name)
    findings += _cards(root, name)
    findings += _unreplicated(root, name)
    findings += _images(name, disks)
    return Prepared(
        xml=definition_text.text(root, stored) if changed else None,
        findings=tuple(findings),
        restart=running is not None and any(part.lacking(running) for part in parts),
    )


class _Part:
    """One setting that a definition should have."""

    code: str
    good: str
    bad: str
    why: str
    live = False
    """Whether `prepare --live` can change the setting in a running guest."""

    def change(self, root: ET.Element) -> bool:
        """Add the setting to a definition. Returns whether anything was changed."""
        raise NotImplementedError

    def lacking(self, root: ET.Element) -> bool:
        """Return whether a definition lacks the setting."""
        return self.change(copy.deepcopy(root))


class _Memory(_Part):
    code = "memory"
    good = "its memory is a file that other processes can map"
    bad = "its memory is private"
    why = (
        "unless the host can find written pages, vmckpt must map and compare all memory, and"
        " private memory cannot be mapped"
    )

    def change(self, root: ET.Element) -> bool:
        backing = root.find("memoryBacking")
        if backing is None:
            backing = ET.Element("memoryBacking")
            _after(root, backing, "currentMemory", "memory", "maxMemory")
        changed = False
        # Huge pages are in files anyway.
        if backing.find("hugepages") is None:
            source = _child(backing, "source")
            changed = source.get("type") != "file"
            source.set("type", "file")
        access = _child(backing, "access")
        changed |= access.get("mode") != "shared"
        access.set("mode", "shared")
        for cell in root.findall("cpu/numa/cell"):
            if cell.get("memAccess", "shared") != "shared":
                cell.set("memAccess", "shared")
                changed = True
        return changed


class _Generation(_Part):
    code = "vmgenid"
    good = "the guest can detect that it was restored (vmgenid)"
    bad = "the guest has no vmgenid"
    why = "without vmgenid, a restored guest repeats random numbers and identities"

    def change(self, root: ET.Element) -> bool:
        if root.find("genid") is not None:
            return False
        _after(root, ET.Element("genid"), "uuid", "name")
        return True


class _Network(_Part):
    code = "network-driver"
    good = "its network cards do not use vhost"
    bad = "a virtio network card uses vhost, which bypasses QEMU"
    why = "only QEMU can buffer output until a checkpoint is safe"
    live = True

    def change(self, root: ET.Element) -> bool:
        if root.get("type") != "kvm":  # libvirt uses vhost for no other guest
            return False
        changed = False
        for card in root.findall("devices/interface"):
            model, driver = card.find("model"), card.find("driver")
            told = None if model is None else model.get("type")
            name = None if driver is None else driver.get("name")
            if wants_vhost(card.get("type", ""), told, name):
                _child(card, "driver").set("name", "qemu")
                changed = True
        return changed


class _Queues(_Part):
    code = "network-queues"
    good = "its network cards have one queue each"
    bad = "a network card has several queues"
    why = "QEMU can buffer only the output of cards with a single queue"
    live = True

    def change(self, root: ET.Element) -> bool:
        changed = False
        for card in root.findall("devices/interface"):
            driver = card.find("driver")
            if card.get("type") in CARDS_OUTSIDE or driver is None:
                continue
            if driver.get("queues", "1") != "1":
                driver.attrib.pop("queues")
                changed = True
        return changed


_PARTS = (_Generation(), _Network(), _Queues())
LIVE_CODES = tuple(part.code for part in _PARTS if part.live)
"""Codes of the findings that `prepare --live` can resolve in a running guest."""


def _child(parent: ET.Element, tag: str) -> ET.Element:
    found = parent.find(tag)
    return ET.SubElement(parent, tag) if found is None else found


def _after(root: ET.Element, new: ET.Element, *tags: str) -> None:
    """Insert an element after the first of `tags` found, as is usual; libvirt accepts any order."""
    for tag in tags:
        found = root.find(tag)
        if found is not None:
            root.insert(list(root).index(found) + 1, new)
            return
    root.insert(0, new)


def _told(part: _Part, guest: str, *, wanted: bool, waits: bool) -> Finding:
    if wanted:
        when = ", effective at the next start" if waits else ""
        text = f"{part.bad}; this will be changed{when}: {part.why}"
    elif waits:
        text = f"{part.bad} until the guest is restarted: {part.why}"
    else:
        return Finding(code=part.code, severity=Severity.OK, where=guest, text=part.good)
    hint = f"shut {guest} down and start it again (a reboot is not enough)" if waits else None
    if waits and part.live:
        hint = f"run vmckpt prepare {guest} --live, or {hint}"
    return Finding(code=part.code, severity=Severity.WARNING, where=guest, text=text, hint=hint)


def _any_memory(root: ET.Element, guest: str) -> Finding:
    """Return the finding on memory that may be private, because the host finds written pages."""
    text = "its memory may stay private: the host can find the pages that the guest writes"
    if not _Memory().lacking(root):
        text = _Memory.good
    return Finding(code="memory", severity=Severity.OK, where=guest, text=text)


def _unplugged(root: ET.Element, running: ET.Element | None, guest: str) -> Iterator[Finding]:
    """Yield a finding for each card of the definition that the running guest lacks."""
    if running is None:
        return
    there = {mac_of(card) for card in running.findall("devices/interface")}
    for card in root.findall("devices/interface"):
        if (mac := mac_of(card)) and mac not in there:
            yield Finding(
                code="network-unplugged", severity=Severity.WARNING, where=guest,
                text=f"network card {mac} is in its definition but not plugged in",
                hint="if vmckpt was interrupted while replacing the card, run vmckpt recover;"
                f" otherwise plug the card in with virsh attach-device {guest} FILE --live",
            )  # fmt: skip


def _folder(root: ET.Element, guest: str) -> Iterator[Finding]:
    """Yield a finding if the guest's memory is in files.

    They must be on tmpfs, the only file system on which QEMU can track writes to memory files.
    """
    if root.find("memoryBacking/source[@type='file']") is not None:
        yield Finding(
            code="memory-folder", severity=Severity.INFO, where=guest,
            text="its memory will be a file in libvirt's memory_backing_dir on its host",
            hint="set memory_backing_dir in each host's qemu.conf to a tmpfs (/dev/shm)",
        )  # fmt: skip


def _cards(root: ET.Element, guest: str) -> Iterator[Finding]:
    """Yield a finding for each network card that cannot be changed to send through QEMU."""
    for card in root.findall("devices/interface"):
        if card.get("type") in CARDS_OUTSIDE:
            mac = card.find("mac")
            address = mac.get("address", "?") if mac is not None else "?"
            yield Finding(
                code="network-outside", severity=Severity.WARNING, where=guest,
                text=f"card {address} ({card.get('type')}) bypasses QEMU: its output cannot be"
                " buffered, so replication and consistent group snapshots are not possible",
                hint="replace it with a virtio card on a bridge",
            )  # fmt: skip


def _unreplicated(root: ET.Element, guest: str) -> Iterator[Finding]:
    """Yield a finding for each kind of device because of which `vmckpt protect` refuses a guest.

    Snapshots can include some of these devices.
    """
    there = kinds(root)
    for kind in NOT_REPLICATED:
        if kind in there:
            text, hint = not_replicated(kind, guest)
            yield Finding(
                code=f"device-{kind}", severity=Severity.WARNING, where=guest,
                text=f"{text}, so vmckpt protect refuses the guest", hint=hint,
            )  # fmt: skip


def _images(guest: str, disks: Sequence[DiskFacts]) -> Iterator[Finding]:
    """Yield a finding for each writable disk: whether its image can have dirty bitmaps."""
    for disk in disks:
        if disk.device != "disk" or disk.read_only or disk.source is None:
            continue
        known, hint = "disk-bitmaps", None
        if disk.format != "qcow2":
            why = f"{disk.format} images cannot track writes, so each snapshot reads the full disk"
            if disk.kind in ("file", "block"):
                new = f"{disk.source}.qcow2"
                hint = f"with {guest} off: qemu-img convert -O qcow2 {disk.source} {new}"
        elif disk.version == 2:
            why = "its image uses the old qcow2 version 2, so each snapshot reads the full disk"
            hint = f"with {guest} off: qemu-img amend -f qcow2 -o compat=1.1 {disk.source}"
        else:
            text = f"disk {disk.name}: snapshots read only changed data"
            yield Finding(code=known, severity=Severity.OK, where=guest, text=text)
            continue
        text = f"disk {disk.name}: {why}"
        yield Finding(code=known, severity=Severity.WARNING, where=guest, text=text, hint=hint)
