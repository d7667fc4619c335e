"""Drives of a guest, and its definition with images elsewhere."""

from xml.etree import ElementTree as ET

from vmckpt.hypervisor import storage
from vmckpt.model.disk import Drive

XML = """<domain type='qemu'><name>web</name><devices>
  <disk type='file' device='disk'><driver name='qemu' type='qcow2' discard='unmap'/>
    <source file='/images/web.qcow2' index='1'><seclabel model='selinux' relabel='no'/></source>
    <backingStore/><target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
  <disk type='file' device='disk'><source file='/images/b.raw'/><target dev='vdb'/></disk>
  <disk type='block' device='lun'><driver type='raw'/><source dev='/dev/sdx'/>
    <target dev='sda'/></disk>
  <disk type='file' device='cdrom'><target dev='sdb'/><readonly/></disk>
  <disk type='file' device='disk'><driver type='qcow2'/><source file='/images/secret'>
    <encryption format='luks'/></source><target dev='vdc'/></disk>
</devices></domain>"""


def test_drives_are_read() -> None:
    first, second, third, fourth, fifth = storage.read_drives(XML)

    assert first == Drive(
        name="vda", kind="file", device="disk", path="/images/web.qcow2", format="qcow2",
        read_only=False, encrypted=False,
    )  # fmt: skip
    assert (second.format, second.path) == ("raw", "/images/b.raw")
    assert (third.kind, third.device, third.path) == ("block", "lun", "/dev/sdx")
    assert (fourth.path, fourth.read_only) == (None, True)
    assert fifth.encrypted


def test_only_the_source_of_that_disk_is_rewritten() -> None:
    written = storage.with_images_at(XML, {"vda": "/srv/a&b.qcow2"})
    before, after = ET.fromstring(XML), ET.fromstring(written)
    source = after.find("devices/disk/source")

    assert source is not None
    assert source.attrib == {"file": "/srv/a&b.qcow2", "index": "1"}
    source.set("file", "/images/web.qcow2")
    assert ET.canonicalize(ET.tostring(before)) == ET.canonicalize(ET.tostring(after))


def test_disks_that_are_no_files_or_not_meant_stay() -> None:
    moved = {"sda": "/x", "sdb": "/x", "vdz": "/x"}
    written = storage.with_images_at(XML, moved)

    assert ET.canonicalize(written) == ET.canonicalize(XML)
