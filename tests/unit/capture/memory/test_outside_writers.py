"""Devices whose writes would be missed."""

import pytest

from vmckpt.capture.memory import outside_writers


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("<disk type='file'><alias name='virtio-disk0'/></disk>", None),
        ("<interface type='bridge'><driver name='vhost'/></interface>", None),
        ("<hostdev type='usb'/>", None),
        ("<filesystem type='mount'><driver type='path'/></filesystem>", None),
        ("<video><model type='qxl'/></video>", None),
        ("<memory model='dimm'/>", None),
        ("<hostdev type='pci'><alias name='hostdev0'/></hostdev>", "hostdev hostdev0 writes"),
        ("<hostdev mode='subsystem' type='mdev'/>", "hostdev writes"),
        ("<interface type='vhostuser'><alias name='net0'/></interface>", "interface net0"),
        ("<interface type='hostdev'/>", "interface"),
        ("<interface type='vdpa'/>", "interface"),
        ("<disk type='nvme'/>", "disk"),
        ("<disk type='vhostuser'/>", "disk"),
        ("<filesystem type='mount'><driver type='virtiofs'/></filesystem>", "filesystem"),
        ("<video><driver name='vhostuser'/></video>", "video"),
        ("<shmem name='s'/>", "shmem"),
        ("<memory model='virtio-mem'/>", "memory is a virtio-mem device"),
    ],
)
def test_they_are_named(device: str, name: str | None) -> None:
    xml = f"<domain><devices><emulator/>{device}</devices></domain>"
    found = outside_writers.found(xml)
    assert (found is None) == (name is None)
    assert (name or "") in (found or "")


def test_a_definition_without_devices_has_none() -> None:
    assert outside_writers.found("<domain/>") is None
