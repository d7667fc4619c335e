"""Backups and checkpoints in libvirt's XML, and disks in QEMU's words."""

import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import block
from vmckpt.hypervisor.backup import (
    CHANGED,
    BitmapLost,
    backup_xml,
    checkpoint_xml,
    new_checkpoint_xml,
    read_backup,
    read_checkpoint,
)
from vmckpt.model.disk import (
    BackupOrder,
    Bitmap,
    Checkpoint,
    DiskFacts,
    DiskOrder,
    OpenBackup,
    OpenDisk,
)
from vmckpt.units import Bytes

ORDER = BackupOrder(
    id="s-2", folder="/run/a&b",
    disks=(DiskOrder(name="vda", since="vmckpt-s-1", mark=True), DiskOrder(name="vdb")),
    left_out=("sda",),
)  # fmt: skip


def same(xml: str | None, expected: str) -> bool:
    assert xml is not None
    return ET.canonicalize(xml) == ET.canonicalize(expected, strip_text=True)


def test_a_backup_is_described_disk_by_disk() -> None:
    assert same(
        backup_xml(ORDER),
        """<domainbackup mode="pull">
          <server transport="unix" socket="/run/a&amp;b/vmckpt-s-2.nbd"/><disks>
          <disk name="vda" backup="yes" type="file" backupmode="incremental"
            incremental="vmckpt-s-1" exportbitmap="changed" exportname="vda">
            <driver type="qcow2"/><scratch file="/run/a&amp;b/vmckpt-s-2.vda.scratch"/></disk>
          <disk name="vdb" backup="yes" type="file" backupmode="full" exportname="vdb">
            <driver type="qcow2"/><scratch file="/run/a&amp;b/vmckpt-s-2.vdb.scratch"/></disk>
          <disk name="sda" backup="no"/></disks></domainbackup>""",
    )
    assert read_backup(backup_xml(ORDER)) == OpenBackup(
        socket="/run/a&b/vmckpt-s-2.nbd",
        disks=(OpenDisk(name="vda", changed=CHANGED), OpenDisk(name="vdb", changed=None)),
    )


def test_a_new_checkpoint_names_every_disk() -> None:
    assert same(
        new_checkpoint_xml(ORDER),
        """<domaincheckpoint><name>vmckpt-s-2</name><disks>
          <disk name="vda" checkpoint="bitmap" bitmap="vmckpt-s-2"/>
          <disk name="vdb" checkpoint="no"/><disk name="sda" checkpoint="no"/>
        </disks></domaincheckpoint>""",
    )
    unmarked = BackupOrder(id="s-2", folder="/run", disks=(DiskOrder(name="vda"),))
    assert new_checkpoint_xml(unmarked) is None


def test_a_checkpoint_is_read_as_it_is_written() -> None:
    known = Checkpoint(
        name="vmckpt-s-2", parent="vmckpt-s-1", made_at=1795219169, disks={"vda": "vmckpt-s-2"}
    )

    assert read_checkpoint(checkpoint_xml(known, parent="vmckpt-s-1")) == known
    assert "parent" not in checkpoint_xml(known, parent=None)
    assert known.ours
    assert not read_checkpoint("<domaincheckpoint><name>theirs</name></domaincheckpoint>").ours


def test_a_backup_of_others_is_known_as_such() -> None:
    theirs = """<domainbackup mode='pull'><server transport='tcp' name='::1' port='10809'/>
      <disks><disk name='vda' backup='yes'/></disks></domainbackup>"""

    assert not read_backup(theirs).ours


@pytest.mark.parametrize("text", ["", "<domainbackup", "<!DOCTYPE x><domaincheckpoint/>", "<a/>"])
def test_nonsense_is_refused(text: str) -> None:
    for read in (read_backup, read_checkpoint):
        with pytest.raises((ValueError, ET.ParseError)):
            read(text)


@pytest.mark.parametrize("when", ["-1", "soon", "9" * 30])
def test_a_time_that_is_none_is_refused(when: str) -> None:
    text = f"<domaincheckpoint><creationTime>{when}</creationTime></domaincheckpoint>"
    with pytest.raises(ValueError, match="creationTime"):
        read_checkpoint(text)


@pytest.mark.parametrize(
    ("text", "disk"),
    [
        ("checkpoint inconsistent: missing or broken bitmap 's-a' for disk 'vda'", "vda"),
        ("Domain checkpoint not found: Checkpoint 'x' for … of disk 'vdb' not found", "vdb"),
        ("checkpoint inconsistent", None),
    ],
)
def test_a_lost_bitmap_names_its_disk(text: str, disk: str | None) -> None:
    lost = BitmapLost(HypervisorError(text, host="alpha", code=109))

    assert (lost.disk, lost.host, lost.code) == (disk, "alpha", 109)


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
