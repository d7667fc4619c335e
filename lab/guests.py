"""Start, find and remove lab guests and their disks."""

import asyncio
import json
import os
import re
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from xml.sax.saxutils import quoteattr

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from vmckpt import inventory
from vmckpt.errors import BadInput, LabError, VmckptError
from vmckpt.hypervisor import domains as hypervisor_domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.units import MIB, Bytes, BytesPerSecond, parse_bytes, parse_rate
from vmckpt_lab import guest_image, guest_templates, host, network, pace
from vmckpt_lab.lab import Say, silent
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.observer import client
from vmckpt_lab.plan import GUEST_BRIDGE, LabPlan, check_name
from vmckpt_lab.shell import run

# The byte that fills part of a disk, so that a test can search for it in other places.
FILLING = b"\xa7"
DEBIAN = "debian"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabGuest:
    """The settings of a lab guest, and its address."""

    name: str
    address: str
    memory: Bytes
    vcpus: int
    dirty: Bytes
    dirty_rate: BytesPerSecond
    disk: Bytes
    """Size of the disk; 0: no disk."""
    disk_format: str
    disk_path: str
    private_disk: bool
    shared_memory: bool
    seed: int = 0
    """Gives guests from the same template different random numbers."""
    chat: int = 0
    """Number of guests, from the lab's first address, that exchange numbered messages; 0: none."""
    os: str = ""
    """`DEBIAN`; empty: the prover alone, which keeps the ledgers (assets/prover.c)."""
    more_addresses: tuple[str, ...] = ()
    """Addresses of the guest's further NICs."""


def parse_dirty(text: str) -> tuple[Bytes, BytesPerSecond]:
    """Parse a text like "64MiB@20MiB/s": the size of a region and its rewrite rate.

    Raises ValueError.
    """
    region, _, rate = text.partition("@")
    return parse_bytes(region), parse_rate(rate) if rate else BytesPerSecond(0)


def domain_xml(lab: LabPlan, guest: LabGuest, booted: guest_image.Image) -> str:
    """Return the guest's definition for libvirt. `booted`: the kernel and initrd that it boots."""
    mac = "52:54:00:" + ":".join(f"{int(part):02x}" for part in guest.address.split(".")[1:])
    # pti=on makes QEMU's TCG flush its TLB at every return to user space. Without these flushes,
    # QEMU 7.2 misses writes during a long pre-copy (docs/adr/0005-tcg-lost-writes.md).
    words = (
        "console=ttyS0 quiet panic=-1 pti=on cryptomgr.notests"
        f" VMC_ADDRESS={guest.address}/24"
        f" VMC_OBSERVER={lab.observer_address} VMC_MEMORY_MIB={guest.dirty // MIB}"
        f" VMC_DIRTY_KIB={guest.dirty_rate // 1024} VMC_MAC={mac} VMC_SEED={guest.seed}"
        f" VMC_RECORDS={pace.RECORDS} VMC_PAUSE_MS={pace.PAUSE_MS}"
    )
    if guest.chat:
        first = lab.guest_address(0)
        own = int(guest.address.rpartition(".")[2]) - int(first.rpartition(".")[2])
        words += f" VMC_CHAT_FIRST={first} VMC_CHAT_PEERS={guest.chat} VMC_CHAT_SELF={own}"
        words += f" VMC_CHAT_RATE={pace.CHATS}"
    backing = (
        "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>"
        if guest.shared_memory
        else ""
    )
    disk = (
        f"<disk type='file' device='disk'><driver name='qemu' type='{guest.disk_format}'"
        f" cache='none'/><source file={quoteattr(guest.disk_path)}/>"
        "<target dev='vda' bus='virtio'/></disk>"
        if guest.disk
        else ""
    )
    return f"""
<domain type='qemu'>
  <name>{guest.name}</name>
  <memory unit='b'>{guest.memory}</memory>
  {backing}
  <vcpu>{guest.vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{booted.kernel}</kernel>
    <initrd>{booted.initramfs}</initrd>
    <cmdline>{words}</cmdline>
  </os>
  <cpu mode='custom' match='exact'><model>qemu64</model></cpu>
  <features><acpi/></features>
  <on_reboot>destroy</on_reboot>
  <devices>
    {disk}
    <interface type='bridge'><mac address='{mac}'/><source bridge='{GUEST_BRIDGE}'/>
      <model type='virtio'/><driver name='qemu'/></interface>
    <serial type='file'><source path='/var/log/libvirt/{guest.name}.console'/></serial>
    <memballoon model='none'/>
    <controller type='usb' model='none'/>
  </devices>
</domain>"""


def start(
    lab: LabPlan,
    name: str,
    on: str,
    *,
    memory: str = "256MiB",
    dirty: str = "64MiB@20MiB/s",
    disk: str = "64MiB",
    disk_format: str = "raw",
    private_disk: bool = False,
    shared_memory: bool = False,
    vcpus: int = 1,
    written: str = "0",
    chat: int = 0,
    boot: bool = False,
    say: Say = silent,
) -> LabGuest:
    """Create and start a guest, and wait until the observer receives its output.

    `written`: size of the area in the middle of the disk that is filled with `FILLING`. `chat`: see
    LabGuest. `boot`: boot the guest instead of starting it from a template. Raises BadInput. Raises
    LabError or HypervisorError if the guest does not start; the guest is then removed.
    """
    try:
        check_name(name)
        region, rate = parse_dirty(dirty)
        size, room, filling = parse_bytes(memory), parse_bytes(disk), parse_bytes(written)
    except ValueError as exc:
        raise BadInput(f"guest {name}: {exc}") from None
    check_new(lab, name, on, disk_format)
    if size < 128 * MIB or region > size - 96 * MIB:
        raise BadInput(
            f"guest {name}: {size // MIB} MiB of memory is not enough for a region of"
            f" {region // MIB} MiB",
            hint="use at least 128 MiB, and at least 96 MiB more than the region",
        )
    folder = lab.private if private_disk else lab.shared
    guest = LabGuest(
        name=name,
        address=free_addresses(lab, 1)[0],
        memory=size,
        vcpus=vcpus,
        dirty=region,
        dirty_rate=rate,
        disk=room,
        disk_format=disk_format,
        disk_path=str(folder / f"{name}.{disk_format}"),
        private_disk=private_disk,
        shared_memory=shared_memory,
        chat=chat,
        seed=secrets.randbits(63),
    )
    booted = guest_image.prepare()
    if room:
        create = f"qemu-img create -q -f {disk_format} {guest.disk_path} {room}".split()
        run(host.enter(lab.host(on), *create))
    if filling:
        write = f"write -P {FILLING[0]} {room // 2 // MIB * MIB} {filling}"
        run(host.enter(lab.host(on), "qemu-io", "-f", disk_format, "-c", write, guest.disk_path))
    record(lab, guest)
    say(f"{name}: starting on {on}")
    try:
        asyncio.run(_launch(lab, on, domain_xml(lab, guest, booted), None if boot else room))
        client.ask(lab.observer_socket, op="watch", guest=name, address=guest.address)
        _wait_until_heard(lab, on, name)
    except BaseException:
        remove(lab, name)
        raise
    say(f"{name}: up at {guest.address}")
    return guest


def check_new(lab: LabPlan, name: str, on: str, disk_format: str) -> None:
    """Raise BadInput if there is no such host or disk format, or already a guest of this name.

    `name`: the new guest's name; `on`: the host on which it is to start.
    """
    names = [h.name for h in lab.hosts]
    if on not in names:
        raise BadInput(
            f"lab {lab.name!r} has no host {on!r}", hint=f"use one of {', '.join(names)}"
        )
    if disk_format not in ("raw", "qcow2"):
        raise BadInput(f"unknown disk format {disk_format!r}", hint="use raw or qcow2")
    if any(guest.name == name for guest in stored(lab)):
        raise BadInput(f"lab {lab.name!r} already has a guest {name!r}")


def stored(lab: LabPlan) -> list[LabGuest]:
    """Return the guests of a lab, as recorded when they were created."""
    path = lab.folder / "guests.json"
    return [LabGuest(**one) for one in json.loads(path.read_text())] if path.exists() else []


def find(lab: LabPlan, name: str) -> LabGuest:
    """Return the guest with this name. Raises BadInput if the lab has no such guest."""
    for guest in stored(lab):
        if guest.name == name:
            return guest
    known = ", ".join(guest.name for guest in stored(lab)) or "none"
    raise BadInput(f"lab {lab.name!r} has no guest {name!r} (guests: {known})")


def _write_down(lab: LabPlan, guests: list[LabGuest]) -> None:
    partial = lab.folder / "guests.json.new"
    partial.write_text(json.dumps([asdict(guest) for guest in guests]))
    partial.rename(lab.folder / "guests.json")


def record(lab: LabPlan, guest: LabGuest) -> None:
    """Add a guest to the lab's records."""
    _write_down(lab, [*stored(lab), guest])


def free_addresses(lab: LabPlan, count: int) -> tuple[str, ...]:
    """Return the first `count` addresses that no guest of the lab has."""
    taken = {one for guest in stored(lab) for one in (guest.address, *guest.more_addresses)}
    free = (lab.guest_address(n) for n in range(100))
    return tuple(islice((one for one in free if one not in taken), count))


def commits_file(lab: LabPlan, name: str) -> Path:
    """Return the file in which an outside client records the commits that a guest acknowledged."""
    return lab.folder / f"{name}.commits"


async def _launch(lab: LabPlan, on: str, xml: str, disk: Bytes | None) -> None:
    """Start a guest. `disk`: the disk size, to start from a template; None: boot the guest."""
    known = inventory.load(lab.inventory)
    async with Hypervisor(known.host(on)) as hypervisor:
        if disk is None:
            await hypervisor_domains.define_and_start(hypervisor, xml)
        else:
            await guest_templates.start(hypervisor, lab.host(on), xml, disk=disk)


def _wait_until_heard(lab: LabPlan, on: str, name: str, *, limit: float = 60.0) -> None:
    give_up = Deadline(limit)
    while client.status(lab.observer_socket, name).heard < 5:
        if give_up.passed():
            raise LabError(
                f"guest {name} sent nothing within {limit:.0f} s, and was removed",
                hint=f"see {lab.host(on).root}/log/{name}.console; try again once the machine is"
                " less busy",
            )
        time.sleep(0.05)


def remove(lab: LabPlan, name: str) -> None:
    """Remove a guest and its disks from every host that is up. The guest need not exist.

    Raises VmckptError and keeps the disks if the guest cannot be removed from a host that is up.
    """
    with suppress(LabError):
        client.ask(lab.observer_socket, op="forget", guest=name)
    asyncio.run(_remove_everywhere(lab, name))
    _end_client(lab, name)
    for folder in (lab.shared, *(h.root / "private" for h in lab.hosts)):
        for path in folder.rglob(f"{name}.*"):
            if re.fullmatch(rf"{re.escape(name)}\.(raw|qcow2)", path.name):
                path.unlink()
    _write_down(lab, [guest for guest in stored(lab) if guest.name != name])


def _end_client(lab: LabPlan, name: str) -> None:
    file = commits_file(lab, name)
    for process in network.processes_in(lab.observer_namespace):
        with suppress(OSError):
            if os.fsencode(file) in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
                os.kill(process, signal.SIGKILL)
    file.unlink(missing_ok=True)


async def _remove_everywhere(lab: LabPlan, name: str) -> None:
    known = inventory.load(lab.inventory)
    up = [known.host(one.name) for one in lab.hosts if host.is_up(one)]
    ends = await asyncio.gather(*(_remove(one, name) for one in up), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


# On a busy machine, a login may time out, or QEMU may take longer to exit than libvirt waits.
_again = retry(
    retry=retry_if_exception_type(VmckptError), stop=stop_after_attempt(3), wait=wait_fixed(1),
    reraise=True,
)  # fmt: skip


@_again
async def _remove(known: Host, name: str) -> None:
    async with Hypervisor(known) as hypervisor:
        await hypervisor_domains.remove(hypervisor, name)


async def whereabouts(lab: LabPlan, name: str) -> list[str]:
    """Return the names of the hosts on which a guest is active.

    `name`: the guest's name. Skips hosts that do not answer. Raises InventoryError.
    """
    known = inventory.load(lab.inventory)
    found = []
    for lab_host in lab.hosts:
        if host.is_up(lab_host):
            with suppress(VmckptError):
                if await _is_active(known.host(lab_host.name), name):
                    found.append(lab_host.name)
    return found


@_again
async def _is_active(known: Host, name: str) -> bool:
    async with Hypervisor(known) as hypervisor:
        guest = await hypervisor_domains.find_guest(hypervisor, name)
        return guest is not None and guest.state.is_active


def disk_seen_from(lab: LabPlan, guest: LabGuest, on: str) -> Path:
    """Return the path, as seen from this machine, of the disk that a guest uses on host `on`.

    Raises HypervisorError, InventoryError.
    """
    known = inventory.load(lab.inventory)

    async def asked() -> Guest | None:
        async with Hypervisor(known.host(on)) as hypervisor:
            return await hypervisor_domains.find_guest(hypervisor, guest.name)

    found = asyncio.run(asked())
    path = Path(found.disks[0].source or "") if found is not None and found.disks else None
    if path is not None and path.is_relative_to(lab.private):
        return lab.host(on).root / "private" / path.relative_to(lab.private)
    return path or Path(guest.disk_path)
