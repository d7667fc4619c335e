"""Devices that bypass QEMU, or whose state cannot be saved or replicated. Pure."""

from xml.etree import ElementTree as ET

from vmckpt.definition.unmigratable import refusals
from vmckpt.model.guest import Refusal

CARDS_OUTSIDE = ("hostdev", "vhostuser", "vdpa")
"""Types of network card whose packets bypass QEMU."""
DISKS_OUTSIDE = ("nvme", "vhostuser", "vhostvdpa")
"""Types of disk that are devices of the host, or of another process, which access the guest's
memory themselves. For `nvme`, QEMU's own driver has the device do this."""
NOT_REPLICATED = ("hostdev", "filesystem", "vsock", "shmem", "redirdev", "tpm")
"""Elements of a definition for devices whose state, or a part of it, is outside QEMU."""
_VHOST_TYPES = ("bridge", "network", "direct", "ethernet")


def wants_vhost(kind: str, model: str | None, driver: str | None) -> bool:
    """Return whether a network card's definition lets libvirt use the kernel's vhost for the card.

    libvirt then uses vhost only for a guest under KVM, and only if the host has vhost. `kind`,
    `model` and `driver`: the card's type, its model and the name of its driver, as in the
    definition.
    """
    virtio = (model or "").startswith("virtio")
    return kind in _VHOST_TYPES and virtio and driver != "qemu"


def kinds(root: ET.Element) -> tuple[str, ...]:
    """Return the element name of each device in a definition, without USB redirection by SPICE.

    virt-install adds such redirection to every guest with SPICE. Without a client it has no state.
    When QEMU loads a state and no client is connected, QEMU unplugs the redirected devices.
    """
    return tuple(
        device.tag
        for device in root.findall("devices/*")
        if not (device.tag == "redirdev" and device.get("type") == "spicevmc")
    )


def unsaved(root: ET.Element) -> Refusal | None:
    """Return the first reason why QEMU refuses to save the guest's state; None if there is none."""
    return next((one for one in refusals(root) if one.by_qemu), None)


def not_replicated(kind: str, guest: str) -> tuple[str, str]:
    """Return what is wrong with a device of `NOT_REPLICATED`, and a hint. `guest`: its name."""
    if kind == "tpm":
        return (
            "its TPM has state that cannot be replicated",
            f"if {guest} stores no keys in its TPM, shut it down, remove <tpm> with virsh edit"
            f" {guest}, and start it again; virt-install adds no TPM with --tpm none",
        )
    return (
        f"its {kind} device has state that cannot be replicated",
        "remove the device from the guest first",
    )
