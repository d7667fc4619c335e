"""Devices and settings because of which libvirt or QEMU refuses to migrate or save a guest. Pure.

libvirt's own rules are those of libvirt 9.0 (qemuMigrationSrcIsAllowed). QEMU reports what its
devices refuse as "blocked-reasons" of query-migrate; the rules here name the device, with a hint,
and also apply to a guest that is off.
"""

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from vmckpt.definition.elements import attribute
from vmckpt.model.guest import Refusal


def refusals(root: ET.Element) -> tuple[Refusal, ...]:
    """Return all reasons in a domain XML against migrating the guest."""
    return (*_by_libvirt(root), *_by_qemu(root))


def _by_libvirt(root: ET.Element) -> Iterator[Refusal]:
    for disk in root.findall("devices/disk[transient]"):
        yield Refusal(
            code="disk-transient", by_qemu=False,
            what=f"has a transient disk: {_named(disk, 'target', 'dev')}",
            hint="remove <transient/> from the disk and restart the guest",
        )  # fmt: skip
    for shmem in root.findall("devices/shmem"):
        name, model = shmem.get("name", "?"), _named(shmem, "model", "type")
        if model == "ivshmem" or shmem.get("role") != "master":
            yield Refusal(
                code="shmem", by_qemu=model == "ivshmem-plain",
                what=f"has shared memory {name!r} of model {model} without role='master'",
                hint="use model ivshmem-plain with role='master', or remove <shmem>",
            )  # fmt: skip
    invtsc = root.findall("cpu/feature[@name='invtsc']")
    if any(one.get("policy", "require") in ("require", "force") for one in invtsc):
        timers = root.findall("clock/timer[@name='tsc']")
        if not any(int(one.get("frequency", "0") or 0) for one in timers):
            yield Refusal(
                code="invtsc", by_qemu=True,
                what="has CPU feature invtsc without a TSC frequency",
                hint="add <timer name='tsc' frequency='HZ'/> to <clock>, or remove the feature",
            )  # fmt: skip
    for shared in root.findall("devices/filesystem"):
        if attribute(shared, "driver", "type") == "virtiofs":
            yield Refusal(
                code="host-device", by_qemu=False,
                what=f"has a virtiofs directory: {_named(shared, 'target', 'dir')}",
                hint="unmount the directory in the guest and run virsh detach-device GUEST FILE",
            )  # fmt: skip


_SECURE = ("sev", "sev-snp", "tdx")


def _by_qemu(root: ET.Element) -> Iterator[Refusal]:
    for secure in root.findall("launchSecurity"):
        if secure.get("type") in _SECURE:
            yield Refusal(
                code="launch-security", what=f"has encrypted memory ({secure.get('type')})",
                hint="remove <launchSecurity> and restart the guest",
            )  # fmt: skip
    for model in root.findall("devices/video/model"):
        if attribute(model, "acceleration", "accel3d") == "yes":
            yield Refusal(
                code="video-3d", what="has a graphics card with 3D acceleration",
                hint="set accel3d='no' in <video> and restart the guest",
            )  # fmt: skip
    for device in root.findall("devices/input[@type='passthrough']"):
        yield Refusal(
            code="input-passthrough",
            what=f"has an input device of its host: {_named(device, 'source', 'evdev')}",
            hint="use <input type='evdev'>, or detach the device with virsh detach-device"
            " GUEST FILE",
        )  # fmt: skip
    for card in root.findall("devices/interface[@type='vdpa']"):
        yield Refusal(
            code="nic-vdpa", what=f"has a vDPA network card: {_named(card, 'mac', 'address')}",
            hint="detach the card with virsh detach-interface GUEST vdpa --mac MAC",
        )  # fmt: skip
    for tpm in root.findall("devices/tpm/backend[@type='passthrough']"):
        yield Refusal(
            code="tpm-passthrough",
            what=f"uses the TPM of its host: {_named(tpm, 'device', 'path')}",
            hint="use <backend type='emulator'> for <tpm> and restart the guest",
        )  # fmt: skip
    for disk in root.findall("devices/disk[@type='dir']"):
        if disk.find("readonly") is None:
            yield Refusal(
                code="disk-directory",
                what=f"has a writable directory as a disk: {_named(disk, 'target', 'dev')}",
                hint="make the disk read-only, or use an image",
            )  # fmt: skip


def _named(node: ET.Element, child: str, name: str) -> str:
    return attribute(node, child, name) or "?"
