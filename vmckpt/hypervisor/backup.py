"""libvirt's pull backups and checkpoints: a guest's disks at one instant, read over NBD.

While a backup is open the guest runs on, and what it overwrites is kept aside on its host. A
checkpoint begins with a backup and lets the next one tell what was written since.

The calls are for a thread on the guest's host; `qmp.call_on_domain` lets a controller make them
from afar.
"""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import block, domain_xml
from vmckpt.hypervisor.qmp import DomainCaller
from vmckpt.model.disk import MARK, BackupOrder, Checkpoint, DiskFacts, OpenBackup, OpenDisk
from vmckpt.units import Seconds

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
    root = domain_xml.tree(xml, "domaincheckpoint")
    made_at = root.findtext("creationTime", "0").strip()
    return Checkpoint(
        name=root.findtext("name", ""),
        parent=root.findtext("parent/name"),
        made_at=domain_xml.count(int(made_at) if made_at.isdecimal() else made_at, "creationTime"),
        disks={
            disk.get("name", ""): disk.get("bitmap", "")
            for disk in root.findall("disks/disk[@checkpoint='bitmap']")
        },
    )


def read_backup(xml: str) -> OpenBackup:
    """An open backup from libvirt's XML."""
    root = domain_xml.tree(xml, "domainbackup")
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


_LOST = (libvirt.VIR_ERR_CHECKPOINT_INCONSISTENT, libvirt.VIR_ERR_NO_DOMAIN_CHECKPOINT)
_DISK = re.compile(r"disk '([^']+)'")
_NO_DOMAIN = libvirt.VIR_DOMAIN_CHECKPOINT_XML_NO_DOMAIN
_REDEFINE = libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE
_VALIDATE = libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE_VALIDATE
_LIMIT = Seconds(30.0)


class BitmapLost(HypervisorError):
    """What was written to a disk since a checkpoint is not known: it must be read whole.

    Nothing has happened. `disk` is None where libvirt does not say which. A `DomainCaller` that
    leaves libvirt's errors to others (`qmp.call_on_domain`) raises this one as HypervisorError with
    libvirt's code.
    """

    def __init__(self, refused: HypervisorError) -> None:
        super().__init__(refused.message, host=refused.host, code=refused.code)
        found = _DISK.search(refused.message)
        self.disk = found[1] if found is not None else None


class Backups:
    """One guest's backups and checkpoints. Every call raises HypervisorError."""

    def __init__(self, caller: DomainCaller) -> None:
        self._seat = caller

    def facts(self) -> tuple[DiskFacts, ...]:
        """The guest's disks; of one that does not run only what its definition says."""
        return self._seat.on_domain("reading the guest's disks", _facts)

    def begin(self, order: BackupOrder) -> OpenBackup:
        """Open a backup; its instant is that of the call, also with a paused guest.

        Also raises BitmapLost and OutcomeUnknown. The checkpoint stays when it is ended.
        """
        described, noted = backup_xml(order), new_checkpoint_xml(order)
        flags = libvirt.VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL if order.scratch_made else 0
        try:
            self._seat.on_domain(
                "beginning a backup", lambda domain: domain.backupBegin(described, noted, flags),
                changes=True,
            )  # fmt: skip
        except HypervisorError as exc:
            if exc.code in _LOST and type(exc) is HypervisorError:
                raise BitmapLost(exc) from exc
            raise
        return read_backup(described)

    def opened(self) -> OpenBackup | None:
        """The backup that is open, whoever opened it; None: there is none."""
        return self._seat.on_domain("looking for an open backup", _opened)

    def end(self, socket: str, *, limit: Seconds = _LIMIT) -> bool:
        """End the backup that has this socket, and wait until it has; whether there was one.

        Checkpoints stay. Raises HypervisorError also if it does not end in that time.
        """
        if not self._seat.on_domain(
            "ending the backup", lambda domain: _abort(domain, socket), changes=True
        ):
            return False
        give_up = time.monotonic() + limit
        while (left := self.opened()) is not None and left.socket == socket:
            if time.monotonic() > give_up:
                host = self._seat.host
                raise HypervisorError(
                    f"{host}: the backup has not ended in {limit:g} s",
                    host=host,
                    hint="run virsh domjobabort for the guest",
                )
            time.sleep(0.02)
        return True

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """What libvirt knows of this guest's checkpoints, parents first."""
        return self._seat.on_domain("listing checkpoints", _checkpoints)

    def forget(self, name: str) -> None:
        """Delete a checkpoint and its bitmaps, also where only some of them are left.

        Fine if there is none. A guest that does not run keeps its bitmaps until `sweep`.
        """
        self._seat.on_domain(
            f"deleting checkpoint {name}", lambda domain: _forget(domain, name), changes=True
        )

    def sweep(self, keep: Collection[str]) -> tuple[str, ...]:
        """Delete checkpoints and bitmaps of ours but for these; the names of those that were.

        What a crash has left is found so, also where only the bitmap is left.
        """

        def change(domain: libvirt.virDomain) -> tuple[str, ...]:
            found = dict.fromkeys(one.name for one in _checkpoints(domain) if one.ours)
            for disk in _facts(domain):
                found |= dict.fromkeys(b.name for b in disk.bitmaps if b.name.startswith(MARK))
            strays = tuple(name for name in found if name not in keep)
            for name in strays:
                _forget(domain, name)
            return strays

        return self._seat.on_domain("deleting old checkpoints", change, changes=True)

    def redefine(self, line: Sequence[Checkpoint], *, validate: bool = True) -> tuple[str, ...]:
        """Tell libvirt of checkpoints whose bitmaps came with the disks; which of them are lost.

        A migration takes the bitmaps along, and libvirt's own notes not. Parents first.
        `validate`: the bitmaps are looked for, which only a running guest allows; without it none
        counts as lost.
        """
        return self._seat.on_domain(
            "defining checkpoints anew",
            lambda domain: _redefine(domain, line, validate=validate),
            changes=True,
        )


def _facts(domain: libvirt.virDomain) -> tuple[DiskFacts, ...]:
    return block.read_facts(domain.XMLDesc(), block.nodes(domain) if domain.isActive() else {})


def _opened(domain: libvirt.virDomain) -> OpenBackup | None:
    if not domain.isActive():
        return None
    try:
        return read_backup(domain.backupGetXMLDesc())
    except libvirt.libvirtError as exc:
        if exc.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_BACKUP:
            return None
        raise


def _abort(domain: libvirt.virDomain, socket: str) -> bool:
    found = _opened(domain)
    if found is None or found.socket != socket:
        return False
    # The call ends any job; this one may have ended, and another begun.
    if domain.jobStats().get("operation") == libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP:
        try:
            domain.abortJob()
        except libvirt.libvirtError as exc:
            if exc.get_error_code() != libvirt.VIR_ERR_OPERATION_INVALID:
                raise
    return True


def _checkpoints(domain: libvirt.virDomain) -> tuple[Checkpoint, ...]:
    found = []
    for one in domain.listAllCheckpoints(libvirt.VIR_DOMAIN_CHECKPOINT_LIST_TOPOLOGICAL):
        with suppress(libvirt.libvirtError):  # it went away while we were reading
            found.append(read_checkpoint(one.getXMLDesc(_NO_DOMAIN)))
    return tuple(found)


def _forget(domain: libvirt.virDomain, name: str) -> None:
    try:
        known: libvirt.virDomainCheckpoint | None = domain.checkpointLookupByName(name)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN_CHECKPOINT:
            raise
        known = None
    if known is not None:
        try:
            known.delete()
        except libvirt.libvirtError:
            # libvirt deletes no bitmap where one of them is missing; that must really be so.
            if domain.isActive() and not _missing(domain, known, name):
                raise
            known.delete(libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)
    if domain.isActive():
        for disk in _facts(domain):
            if disk.node is not None and disk.bitmap(name) is not None:
                block.remove_bitmap(domain, disk.node, name)


def _missing(domain: libvirt.virDomain, known: libvirt.virDomainCheckpoint, name: str) -> bool:
    """Whether a disk lacks the bitmap that it should have for a checkpoint."""
    wanted = read_checkpoint(known.getXMLDesc(_NO_DOMAIN)).disks
    there = {disk.name for disk in _facts(domain) if disk.bitmap(wanted.get(disk.name, name))}
    return not set(wanted) <= there


def _redefine(
    domain: libvirt.virDomain, line: Sequence[Checkpoint], *, validate: bool
) -> tuple[str, ...]:
    flags = _REDEFINE | _VALIDATE if validate else _REDEFINE
    known = {one.getName() for one in domain.listAllCheckpoints()}
    lost = []
    for one in line:
        # A parent that is not there any more is none.
        parent = one.parent if one.parent in known else None
        try:
            domain.checkpointCreateXML(checkpoint_xml(one, parent=parent), flags)
            known.add(one.name)
        except libvirt.libvirtError as exc:
            if exc.get_error_code() != libvirt.VIR_ERR_CHECKPOINT_INCONSISTENT:
                raise
            lost.append(one.name)
    return tuple(lost)
