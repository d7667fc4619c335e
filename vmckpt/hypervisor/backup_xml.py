"""Backups and checkpoints in libvirt's XML, written and read."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from xml.etree import ElementTree as ET

from vmckpt.hypervisor import parse
from vmckpt.model.disk import (
    MARK,
    BackupOrder,
    Checkpoint,
    OpenBackup,
    OpenDisk,
)

_CHANGED = "changed"
CHANGED = f"qemu:dirty-bitmap:{_CHANGED}"


def backup_xml(order: BackupOrder) -> str:
    """A backup as libvirt wants it described."""
    root = ET.Element("domainbackup", mode="pull")
    ET.SubElement(root, "server", transport="unix", socket=order.socket)
    disks = ET.SubElement(root, "disks")
    for disk in order.disks:
        how = {"backupmode": "full"}
        if disk.since is not None:
            how = {
                "backupmode": "incremental", "incremental": disk.since, "exportbitmap": _CHANGED,
            }  # fmt: skip
        node = ET.SubElement(
            disks, "disk", {"name": disk.name, "backup": "yes", "type": "file"} | how,
            exportname=disk.name,
        )  # fmt: skip
        ET.SubElement(node, "driver", type="qcow2")
        ET.SubElement(node, "scratch", file=order.scratch(disk.name))
    for name in order.left_out:
        ET.SubElement(disks, "disk", name=name, backup="no")
    return ET.tostring(root, encoding="unicode")


def new_checkpoint_xml(order: BackupOrder) -> str | None:
    """The checkpoint that begins with a backup; None if no disk can be followed."""
    marked = [disk.name for disk in order.disks if disk.mark]
    if not marked:
        return None
    others = [disk.name for disk in order.disks if not disk.mark]
    name = order.checkpoint
    root = _checkpoint(name, dict.fromkeys(marked, name), (*others, *order.left_out))
    return ET.tostring(root, encoding="unicode")


def checkpoint_xml(known: Checkpoint, *, parent: str | None) -> str:
    """A checkpoint that exists already, as libvirt wants it described."""
    root = _checkpoint(known.name, known.disks, ())
    if parent is not None:
        ET.SubElement(ET.SubElement(root, "parent"), "name").text = parent
    ET.SubElement(root, "creationTime").text = str(known.made_at)
    return ET.tostring(root, encoding="unicode")


def _checkpoint(name: str, bitmaps: Mapping[str, str], others: Sequence[str]) -> ET.Element:
    root = ET.Element("domaincheckpoint")
    ET.SubElement(root, "name").text = name
    disks = ET.SubElement(root, "disks")
    for disk, bitmap in bitmaps.items():
        ET.SubElement(disks, "disk", name=disk, checkpoint="bitmap", bitmap=bitmap)
    for disk in others:
        ET.SubElement(disks, "disk", name=disk, checkpoint="no")
    return root


def read_checkpoint(xml: str) -> Checkpoint:
    """A checkpoint from libvirt's XML."""
    root = parse.tree(xml, "domaincheckpoint")
    made_at = root.findtext("creationTime", "0").strip()
    return Checkpoint(
        name=root.findtext("name", ""),
        parent=root.findtext("parent/name"),
        made_at=parse.count(int(made_at) if made_at.isdecimal() else made_at, "creationTime"),
        disks={
            disk.get("name", ""): disk.get("bitmap", "")
            for disk in root.findall("disks/disk[@checkpoint='bitmap']")
        },
    )


def read_backup(xml: str) -> OpenBackup:
    """An open backup from libvirt's XML."""
    root = parse.tree(xml, "domainbackup")
    server = root.find("server")
    socket = server.get("socket", "") if server is not None else ""
    return OpenBackup(
        socket=socket,
        disks=tuple(
            OpenDisk(
                name=disk.get("exportname", disk.get("name", "")),
                changed=CHANGED if disk.get("backupmode") == "incremental" else None,
            )
            for disk in root.findall("disks/disk[@backup='yes']")
        ),
        ours=PurePosixPath(socket).name.startswith(MARK),
    )
