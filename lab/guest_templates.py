"""Start lab guests from templates: saved states of similar guests that have already booted.

Without KVM, booting a guest takes seconds of CPU time. A template is the state of a guest that has
booted and is waiting for its settings (assets/prover.c), as saved by libvirt. To start a guest, its
template is restored with the new guest's own definition. The guest then reads its settings from the
command line of its new QEMU process, as it would after a boot.

A template fits all guests whose definitions differ only in values that the guest reads from its
settings or never sees: name, MAC address, paths, image format. Templates are cached. A template is
valid for one version of QEMU, of libvirt and of the image that guests boot from.
"""

import asyncio
import hashlib
import os
from io import FileIO
from pathlib import Path
from xml.etree import ElementTree

from vmckpt.capture.qemu_stream import save_image
from vmckpt.errors import LabError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Bytes, Seconds
from vmckpt_lab import guest_image
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import CACHE, HostPlan
from vmckpt_lab.shell import run

FOLDER = CACHE / "templates"
_NAME = "template"
_SHARED = ("VMC_MEMORY_MIB=",)
"""Prefixes of settings that a guest reads before it waits; its template must have the same."""
_MAC = "52:54:00:00:00:01"
_WAITS = "waiting for settings"
_BOOTS = Seconds(120.0)
"""Time limit for a boot, which takes 4 s on an idle machine."""
_KEPT = 40
"""Maximum number of cached templates, 100 to 200 MiB each. The least recently used are removed."""
_PIECE = 1 << 20


async def start(hypervisor: Hypervisor, host: HostPlan, xml: str, *, disk: Bytes) -> None:
    """Define a guest on `host` and start it from a template, which is created if it is missing.

    `xml`: the guest's definition, with its settings in the kernel command line, as words that begin
    with VMC_. `disk`: size of the guest's disk; 0: no disk. Raises LabError or HypervisorError; the
    guest is then neither defined nor running.
    """
    described = generalised(xml)
    versions = await domains.versions(hypervisor)
    wanted = FOLDER / hashlib.sha256(f"{versions} {disk} {described}".encode()).hexdigest()[:16]
    saved = _opened(wanted)
    if saved is None:
        with guest_image.held(FOLDER):
            # Another lab may have created the template while this lab waited for the lock.
            if not wanted.exists():
                await _make(hypervisor, host, described, disk, wanted)
            saved = _opened(wanted)
    if saved is None:
        raise LabError(f"template {wanted} was removed before use", hint="run the command again")
    with saved:
        await _restore(hypervisor, host, xml, saved.fileno())


def _opened(template: Path) -> FileIO | None:
    """Open a template, which then stays readable even if removed. Returns None if missing."""
    try:
        os.utime(template)
        return template.open("rb", buffering=0)
    except FileNotFoundError:
        return None


def generalised(xml: str) -> str:
    """Return the definition of the template for a guest. Pure.

    It is equal for all guests that differ only in their name, MAC addresses, paths, image format
    and private settings.
    """
    root = ElementTree.fromstring(xml)
    _element(root, "name").text = _NAME
    line = _element(root, "os/cmdline")
    words = [
        word
        for word in (line.text or "").split()
        if word.startswith(_SHARED) or not word.startswith("VMC_")
    ]
    line.text = " ".join([*words, "VMC_TEMPLATE=1"])
    for mac in root.findall("devices/interface/mac"):
        mac.set("address", _MAC)
    for disk in root.findall("devices/disk"):
        _element(disk, "source").set("file", str(FOLDER / "disk"))
        _element(disk, "driver").set("type", "raw")
    _element(root, "devices/serial/source").set("path", f"/var/log/libvirt/{_NAME}.console")
    return ElementTree.tostring(root, encoding="unicode")


def _element(parent: ElementTree.Element, path: str) -> ElementTree.Element:
    found = parent.find(path)
    if found is None:
        raise LabError(f"the guest's definition has no {path}")
    return found


async def _make(
    hypervisor: Hypervisor, host: HostPlan, described: str, disk: Bytes, wanted: Path
) -> None:
    for old in sorted(FOLDER.glob("[0-9a-f]*"), key=_last_use)[: -(_KEPT - 1)]:
        old.unlink()
    blank, partial = FOLDER / "disk", FOLDER / ".partial"
    console = host.root / f"log/{_NAME}.console"
    console.unlink(missing_ok=True)
    try:
        if disk:
            run(["truncate", "-s", str(disk), str(blank)])
        await domains.start_transient(hypervisor, described)
        await _until_it_waits(console)
        await domains.save(hypervisor, _NAME, str(partial))
        partial.rename(wanted)
    except BaseException:
        await domains.remove(hypervisor, _NAME)
        raise
    finally:
        for path in (blank, partial):
            path.unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    return path.stat().st_mtime


async def _until_it_waits(console: Path) -> None:
    give_up = Deadline(_BOOTS)
    while not _waits(console):
        if give_up.passed():
            raise LabError(
                f"the template guest did not boot within {_BOOTS:g} s",
                hint=f"see {console}; try again once the machine is less busy",
            )
        await asyncio.sleep(0.05)


def _waits(console: Path) -> bool:
    return console.exists() and _WAITS in console.read_text(errors="replace")


async def _restore(hypervisor: Hypervisor, host: HostPlan, xml: str, saved: int) -> None:
    with os.fdopen(os.dup(saved), "rb", buffering=0) as file:
        was = save_image.read_header(file)
        begins = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    own = await domains.define(hypervisor, xml)
    name = _element(ElementTree.fromstring(xml), "name").text or ""
    beginning = save_image.header(own, running=True, cookie=was.cookie)

    def fill(pipe: int) -> None:
        at = begins
        os.write(pipe, beginning)
        while sent := os.sendfile(pipe, saved, at, _PIECE):
            at += sent

    try:
        with save_image.Fifo(host.root / "cache", fill) as path:
            inside = "/var/cache/libvirt" / path.relative_to(host.root / "cache")
            await domains.restore(hypervisor, str(inside), own)
    except BaseException:
        await domains.remove(hypervisor, name)
        raise
