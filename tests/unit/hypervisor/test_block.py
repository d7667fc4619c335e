"""A guest's disks, as libvirt and QEMU tell of them."""

import json
from typing import Any

import pytest

from vmckpt.hypervisor import block
from vmckpt.model.disk import Bitmap, DiskFacts
from vmckpt.units import Bytes

XML = """<domain><devices>
  <disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
    <source file='/i/a.qcow2' index='1'/><target dev='vda'/></disk>
  <disk type='block' device='disk'><driver type='raw'/><source dev='/dev/x' index='2'/>
    <target dev='vdb'/><shareable/></disk>
  <disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>
  <disk type='network' device='disk'><source protocol='rbd' name='pool/x'/>
    <target dev='vdc'/></disk>
</devices></domain>"""


NODES: dict[str, dict[str, Any]] = {
    "libvirt-1-format": {
        "node-name": "libvirt-1-format",
        "image": {
            "virtual-size": 67108864,
            "format-specific": {"type": "qcow2", "data": {"compat": "1.1"}},
        },
        "dirty-bitmaps": [
            {"name": "vmckpt-s-1", "recording": True, "persistent": True, "busy": False},
            {"name": "b", "recording": False, "persistent": True, "inconsistent": True},
            {"recording": True, "busy": True},
        ],
    },
    "libvirt-1-storage": {"image": {"virtual-size": 393216}},
    "libvirt-2-storage": {"image": {"virtual-size": 1048576}},
}


def test_disks_are_what_libvirt_and_qemu_say_of_them() -> None:
    first, second, third, fourth = block.read_facts(XML, NODES)

    assert first == DiskFacts(
        name="vda", kind="file", device="disk", format="qcow2", source="/i/a.qcow2",
        size=Bytes(67108864), version=3, node="libvirt-1-format",
        bitmaps=(
            Bitmap(name="vmckpt-s-1"),
            Bitmap(name="b", recording=False, inconsistent=True),
        ),
    )  # fmt: skip
    assert [one.whole for one in first.bitmaps] == [True, False]
    assert (second.node, second.size, second.shareable) == ("libvirt-2-storage", 1048576, True)
    assert (third.source, third.read_only, third.device) == (None, True, "cdrom")
    assert (fourth.source, fourth.format, fourth.size) == ("pool/x", "raw", None)
    assert [one.node for one in block.read_facts(XML, {})] == [None] * 4


def test_an_old_image_is_known_by_its_version() -> None:
    nodes = json.loads(json.dumps(NODES))
    nodes["libvirt-1-format"]["image"]["format-specific"]["data"]["compat"] = "0.10"

    assert block.read_facts(XML, nodes)[0].version == 2


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="the disk's size"):
        block.read_facts(XML, {"libvirt-1-format": {"image": {"virtual-size": -1}}})
