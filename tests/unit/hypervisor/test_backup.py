"""Backups and checkpoints in libvirt's XML."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import libvirt_qemu
import pytest

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.backup import (
    CHANGED,
    Backups,
    BitmapLost,
    backup_xml,
    checkpoint_xml,
    new_checkpoint_xml,
    read_backup,
    read_checkpoint,
)
from vmckpt.model.disk import (
    BackupOrder,
    Checkpoint,
    DiskOrder,
    OpenBackup,
    OpenDisk,
)

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


class Refusing:
    """A running guest without checkpoints, whose QEMU keeps the bitmaps named in `busy`."""

    host = "alpha"
    XML = """<domain><devices><disk type='file' device='disk'><source file='/i/a' index='1'/>
      <target dev='vda'/></disk></devices></domain>"""

    def __init__(self, *bitmaps: str, busy: str) -> None:
        self.bitmaps, self._busy = list(bitmaps), busy

    def on_domain(self, _what: str, call: Callable[[Any], Any], *, changes: bool = False) -> Any:
        del changes
        unknown: Any = libvirt.libvirtError("none")
        unknown.err = (libvirt.VIR_ERR_NO_DOMAIN_CHECKPOINT, 0, "none", 2, "", "", "", 0, 0)

        def look_up(_: str) -> None:
            raise unknown

        return call(SimpleNamespace(
            isActive=lambda: 1, checkpointLookupByName=look_up, XMLDesc=lambda _=0: self.XML,
            listAllCheckpoints=lambda _: [], connect=lambda: None,
        ))  # fmt: skip

    def command(self, _domain: object, text: str, _flags: int) -> str:
        order = json.loads(text)
        if order["execute"] == "query-named-block-nodes":
            bitmaps = [{"name": name, "recording": True} for name in self.bitmaps]
            node = {"node-name": "libvirt-1-format", "dirty-bitmaps": bitmaps}
            return json.dumps({"return": [node]})
        name = order["arguments"]["name"]
        if name == self._busy:
            return json.dumps({"error": {"class": "GenericError", "desc": f"{name} is in use"}})
        self.bitmaps.remove(name)
        return '{"return": {}}'


def test_a_bitmap_that_qemu_keeps_is_not_reported_as_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guest = Refusing("vmckpt-s-1", "vmckpt-s-2", busy="vmckpt-s-1")
    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", guest.command)
    backups = Backups(guest)

    with pytest.raises(HypervisorError, match=r"deleting checkpoint .*: .* is in use"):
        backups.forget("vmckpt-s-1")
    assert backups.sweep([]) == ("vmckpt-s-2",)
    assert guest.bitmaps == ["vmckpt-s-1"]
