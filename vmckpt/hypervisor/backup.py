"""libvirt's pull backups and checkpoints: a guest's disks at one instant, read over NBD.

The guest keeps running during a backup job; its host keeps the old content of overwritten blocks
in scratch files. A checkpoint is created with a backup, and records the writes until the next
checkpoint.

The calls block, so they must run in a thread on the guest's host. A controller makes the calls
through `qmp.call_on_domain`.
"""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import block, domain_xml, storage
from vmckpt.hypervisor.qmp import DomainCaller
from vmckpt.model.disk import MARK, BackupOrder, Checkpoint, DiskFacts, OpenBackup, OpenDisk
from vmckpt.units import Seconds

_CHANGED = "changed"
CHANGED = f"qemu:dirty-bitmap:{_CHANGED}"


def backup_xml(order: BackupOrder) -> str:
    """Return libvirt's XML for a backup."""
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
    """Return the XML of the checkpoint that is created with a backup.

    Returns None if the order asks for no dirty bitmap on any disk.
    """
    marked = [disk.name for disk in order.disks if disk.mark]
    if not marked:
        return None
    others = [disk.name for disk in order.disks if not disk.mark]
    name = order.checkpoint
    root = _checkpoint(name, dict.fromkeys(marked, name), (*others, *order.left_out))
    return ET.tostring(root, encoding="unicode")


def checkpoint_xml(known: Checkpoint, *, parent: str | None) -> str:
    """Return libvirt's XML for a checkpoint that exists already.

    `parent`: name of the parent checkpoint; None: it has none.
    """
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
    """Parse libvirt's XML of a checkpoint. Raises ValueError."""
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
    """Parse libvirt's XML of an active backup job. Raises ValueError."""
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
    """The changes to a disk since a checkpoint are unknown: the complete disk must be read.

    No backup was opened. `disk` is None if libvirt's error does not name the disk. A `DomainCaller`
    that does not map libvirt's errors itself (`qmp.call_on_domain`) raises a HypervisorError with
    libvirt's code instead.
    """

    def __init__(self, refused: HypervisorError) -> None:
        super().__init__(refused.message, host=refused.host, code=refused.code)
        found = _DISK.search(refused.message)
        self.disk = found[1] if found is not None else None


class Backups:
    """Backups and checkpoints of one guest.

    Every call raises HypervisorError if libvirt fails. Calls that change something also raise
    OutcomeUnknown.
    """

    def __init__(self, caller: DomainCaller) -> None:
        self._seat = caller

    def facts(self) -> tuple[DiskFacts, ...]:
        """Return the guest's disks; if the guest is off, only the facts in its definition."""
        return self._seat.on_domain("reading the guest's disks", _facts)

    def begin(self, order: BackupOrder) -> OpenBackup:
        """Open a backup of the disks as they are at this call. The guest may be paused.

        The checkpoint remains after the backup has ended. Also raises BitmapLost and
        OutcomeUnknown.
        """
        described, noted = backup_xml(order), new_checkpoint_xml(order)
        flags = libvirt.VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL if order.scratch_made else 0
        try:
            self._seat.on_domain(
                "starting a backup", lambda domain: domain.backupBegin(described, noted, flags),
                changes=True,
            )  # fmt: skip
        except HypervisorError as exc:
            if exc.code in _LOST and type(exc) is HypervisorError:
                raise BitmapLost(exc) from exc
            raise
        return read_backup(described)

    def opened(self) -> OpenBackup | None:
        """Return the active backup job, even if another tool started it; None if there is none."""
        return self._seat.on_domain("looking for an active backup job", _opened)

    def end(self, socket: str, *, limit: Seconds = _LIMIT) -> bool:
        """Stop the backup with this socket and wait until it has stopped.

        Returns whether the backup was open. Its checkpoint remains. Raises HypervisorError, also
        for a backup that does not stop within `limit`.
        """
        if not self._seat.on_domain(
            "stopping the backup", lambda domain: _abort(domain, socket), changes=True
        ):
            return False
        give_up = time.monotonic() + limit
        while (left := self.opened()) is not None and left.socket == socket:
            if time.monotonic() > give_up:
                host = self._seat.host
                raise HypervisorError(
                    f"{host}: the backup did not stop within {limit:g} s",
                    host=host,
                    hint=f"run virsh domjobabort GUEST on {host}",
                )
            time.sleep(0.02)
        return True

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the guest's checkpoints as recorded by libvirt, parents first."""
        return self._seat.on_domain("listing checkpoints", list_checkpoints)

    def forget(self, name: str) -> None:
        """Delete a checkpoint and its bitmaps, even if some bitmaps are missing.

        If the checkpoint does not exist, only bitmaps with its name are deleted. If the guest is
        off, the bitmaps remain until `sweep`. Raises HypervisorError, also if QEMU refuses.
        """
        what, host = f"deleting checkpoint {name}", self._seat.host
        refused = self._seat.on_domain(what, lambda domain: _forget(domain, name), changes=True)
        if refused is not None:
            raise HypervisorError(f"{host}: {what}: {refused}", host=host)

    def sweep(self, keep: Collection[str]) -> tuple[str, ...]:
        """Delete vmckpt's checkpoints and bitmaps except `keep`. Returns the deleted names.

        Cleans up after a crash, even if only a bitmap of a checkpoint is left. A bitmap that QEMU
        refuses to delete remains until the next call. `keep`: names of checkpoints.
        """

        def change(domain: libvirt.virDomain) -> tuple[str, ...]:
            found = dict.fromkeys(one.name for one in list_checkpoints(domain) if one.ours)
            for disk in _facts(domain):
                found |= dict.fromkeys(b.name for b in disk.bitmaps if b.name.startswith(MARK))
            strays = [name for name in found if name not in keep]
            return tuple(name for name in strays if _forget(domain, name) is None)

        return self._seat.on_domain("deleting old checkpoints", change, changes=True)

    def redefine(self, line: Sequence[Checkpoint], *, validate: bool = True) -> tuple[str, ...]:
        """Redefine in libvirt the checkpoints whose bitmaps were transferred with the disks.

        A migration transfers the bitmaps, but not libvirt's checkpoint metadata. `line`: the
        checkpoints, parents first. `validate`: verify that the bitmaps exist; the guest must run.
        Returns the names of checkpoints without a bitmap; empty if `validate` is false.
        """
        return self._seat.on_domain(
            "redefining checkpoints",
            lambda domain: _redefine(domain, line, validate=validate),
            changes=True,
        )


def _facts(domain: libvirt.virDomain) -> tuple[DiskFacts, ...]:
    known = block.nodes(domain) if domain.isActive() else {}
    return block.read_facts(storage.definition(domain), known)


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
    # abortJob aborts any job: the backup may be over, and another job may have started.
    if domain.jobStats().get("operation") == libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP:
        try:
            domain.abortJob()
        except libvirt.libvirtError as exc:
            if exc.get_error_code() != libvirt.VIR_ERR_OPERATION_INVALID:
                raise
    return True


def list_checkpoints(domain: libvirt.virDomain) -> tuple[Checkpoint, ...]:
    """Return a domain's checkpoints, parents first. Raises libvirtError, ValueError."""
    found = []
    for one in domain.listAllCheckpoints(libvirt.VIR_DOMAIN_CHECKPOINT_LIST_TOPOLOGICAL):
        with suppress(libvirt.libvirtError):  # the checkpoint was deleted meanwhile
            found.append(read_checkpoint(one.getXMLDesc(_NO_DOMAIN)))
    return tuple(found)


def _forget(domain: libvirt.virDomain, name: str) -> str | None:
    """Delete a checkpoint and its bitmaps. Returns why a bitmap remains; None: none remains."""
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
            # libvirt refuses if a bitmap is missing; check that this was the reason.
            if domain.isActive() and not _missing(domain, known, name):
                raise
            known.delete(libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)
    refused = None
    if domain.isActive():
        for disk in _facts(domain):
            if disk.node is not None and disk.bitmap(name) is not None:
                refused = block.remove_bitmap(domain, disk.node, name) or refused
    return refused


def _missing(domain: libvirt.virDomain, known: libvirt.virDomainCheckpoint, name: str) -> bool:
    """Return whether any disk lacks its bitmap for the checkpoint."""
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
        # libvirt rejects an unknown parent.
        parent = one.parent if one.parent in known else None
        try:
            domain.checkpointCreateXML(checkpoint_xml(one, parent=parent), flags)
            known.add(one.name)
        except libvirt.libvirtError as exc:
            if exc.get_error_code() != libvirt.VIR_ERR_CHECKPOINT_INCONSISTENT:
                raise
            lost.append(one.name)
    return tuple(lost)
