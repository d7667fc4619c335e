"""Find devices that prevent write tracking of a guest's memory. Pure.

Write tracking finds only writes through QEMU's page tables. Passed-through devices use DMA, and
vhost-user processes map the memory themselves.
"""

from xml.etree import ElementTree as ET

from vmckpt.capture.device_limits import CARDS_OUTSIDE, DISKS_OUTSIDE


def found(xml: str) -> str | None:
    """Return why a running guest's memory cannot be tracked; None if no device prevents it.

    The reason names the first device that writes memory without QEMU, or whose state QEMU cannot
    save without the guest's memory (virtio-mem).
    """
    devices = ET.fromstring(xml).find("devices")
    for one in () if devices is None else devices:
        if (why := _why(one)) is not None:
            return why
    return None


def _why(device: ET.Element) -> str | None:
    kind = device.get("type", "")
    alias = device.find("alias")
    name = f"{device.tag} {'' if alias is None else alias.get('name', '')}".strip()
    driver = device.find("driver")
    outside = (
        (device.tag == "hostdev" and kind not in ("usb", "scsi"))
        or (device.tag == "interface" and kind in CARDS_OUTSIDE)
        or (device.tag == "disk" and kind in DISKS_OUTSIDE)
        or (device.tag == "filesystem" and driver is not None and driver.get("type") == "virtiofs")
        or (device.tag == "video" and driver is not None and driver.get("name") == "vhostuser")
        or device.tag == "shmem"
    )
    if outside:
        return f"{name} writes the guest's memory without QEMU"
    if device.tag == "memory" and device.get("model") == "virtio-mem":
        return (
            f"{name} is a virtio-mem device, whose state QEMU cannot save without the guest's"
            " memory"
        )
    return None
