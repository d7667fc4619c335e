"""Disk images, a guest's backups and checkpoints, and where snapshots are kept."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from vmckpt.model.finding import Finding
from vmckpt.units import Bytes

NVRAM = "nvram"
"""Name for the file of firmware variables, which a definition does not list as a disk."""
_LOCKED = re.compile(r'Failed to get (shared )?("[^"]+" )?lock\b')


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A drive in a guest's definition."""

    name: str
    """Name in the guest: "vda"."""
    kind: str
    """libvirt's source type: "file", "block", "network", …"""
    device: str
    """"disk", "cdrom", "floppy", "lun" or NVRAM."""
    path: str | None
    """Path of the source; None: the drive is empty, or its source is not a path."""
    format: str
    read_only: bool
    encrypted: bool
    shareable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Facts about an image, as reported by qemu-img on the source."""

    size: Bytes
    """Virtual size: the disk's size in the guest."""
    allocated: Bytes
    """Space that the image occupies now."""
    options: str
    """Options for `qemu-img create -o`, to create a copy with the same features."""
    mode: str
    """Permissions of the file, in octal."""
    backing: str | None = None
    backing_format: str | None = None
    data_file: str | None = None
    snapshots: int = 0
    """Number of internal snapshots."""
    damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A location for a new image on the target."""

    exists: bool
    """A file with this name already exists."""
    writable: bool
    """The directory exists and is writable."""
    device: str
    """Device number of the file system."""
    free: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """The operator's options for copying disks."""

    full: bool = False
    """Allocate the full size on the target; False: allocate only the bytes that were written."""
    disks: tuple[str, ...] = ()
    """Names ("vda") of the disks to copy; empty: all disks that are not shared."""
    folder: str | None = None
    """Directory on the target; None: the same path as on the source."""
    remove: bool = False
    """Delete the source's images once the guest has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopy:
    """One disk to be copied."""

    name: str
    source: str
    path: str
    """Path of the copy on the target."""
    format: str
    size: Bytes
    needed: Bytes
    """Space that the copy will initially occupy on the target."""
    allocated: Bytes
    """Bytes that were written to the disk, and will be sent."""
    full: bool
    options: str
    mode: str
    base: tuple[str, str] | None = None
    """Path and format of the backing file, which the target has; None: the copy is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The space that copies need on one file system of the target."""

    device: str
    """Device number of the file system."""
    folder: str
    """The directory of one of the copies."""
    free: Bytes
    needed: Bytes
    """Space that the copies initially occupy."""
    grown: Bytes
    """Space that the copies occupy once they have grown to their full size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The disks to copy, and all findings about copying them."""

    copies: tuple[DiskCopy, ...] = ()
    findings: tuple[Finding, ...] = ()
    rest_shared: bool = True
    """Every writable disk that is not copied was verified to be the same on both hosts."""
    rooms: tuple[Room, ...] = ()
    removes: bool = False
    """The source's images are deleted once the guest has arrived."""

    @property
    def size(self) -> Bytes:
        """Virtual size of all copies."""
        return Bytes(sum(copy.size for copy in self.copies))

    @property
    def travels(self) -> Bytes:
        """Bytes that are sent for all copies, without holes."""
        return Bytes(sum(copy.allocated for copy in self.copies))

    @property
    def shallow(self) -> bool:
        """Whether a copy has a backing file, so only the data above it is sent."""
        return any(copy.base is not None for copy in self.copies)

    @property
    def disks(self) -> tuple[str, ...]:
        return tuple(copy.name for copy in self.copies)

    @property
    def placed(self) -> dict[str, str]:
        """Path on the target of each copied disk, by the disk's name."""
        return {copy.name: copy.path for copy in self.copies}

    @property
    def room(self) -> dict[str, Bytes]:
        """Sizes of raw images to preallocate once the guest has arrived, by path."""
        full = [copy for copy in self.copies if copy.full and copy.format == "raw"]
        return {copy.path: copy.size for copy in full}

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Images on the source that are unused after the move."""
        return tuple(copy.source for copy in self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Images created on the target, each with a mark that identifies it."""

    host: str
    suffix: str
    """Suffix of an image's temporary name, used until its mark is in the journal."""
    marks: dict[str, str] = field(default_factory=dict)
    """Mark by path: file system, inode and birth time; "": not created, or unknown."""

    def temporary(self, path: str) -> str:
        """Return the name that an image has until its mark is in the journal."""
        return f"{path}.{self.suffix}"


MARK = "vmckpt-"
"""Prefix of the names of vmckpt's backup files, checkpoints and bitmaps."""


def checkpoint_of(snapshot: str) -> str:
    """Return the name of a snapshot's checkpoint in libvirt and QEMU."""
    return MARK + snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap:
    """A dirty bitmap: records which parts of a disk were written since the bitmap was created."""

    name: str
    recording: bool = True
    persistent: bool = True
    busy: bool = False
    inconsistent: bool = False
    """QEMU terminated without saving the bitmap."""

    @property
    def whole(self) -> bool:
        """Whether the bitmap's content is complete."""
        return self.recording and not self.busy and not self.inconsistent


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """A disk of a guest, with facts from its running QEMU."""

    name: str
    """Name in the guest: "vda"."""
    kind: str
    """libvirt's source type: "file", "block", "network", …"""
    device: str
    """"disk", "cdrom", "floppy" or "lun"."""
    format: str
    source: str | None
    """Path, device or name; None: the drive is empty."""
    read_only: bool = False
    shareable: bool = False
    size: Bytes | None = None
    """Size of the disk; None: unknown, for example because the guest is off."""
    version: int | None = None
    """Version of a qcow2 image, 2 or 3; None: another format, or unknown."""
    node: str | None = None
    """Name of the disk's block node in QEMU."""
    bitmaps: tuple[Bitmap, ...] = ()
    base: tuple[str, str] | None = None
    """Path and format of the image's backing file.

    None: there is no backing store, it is not a file, or it is unknown.
    """

    def bitmap(self, name: str) -> Bitmap | None:
        """Return the bitmap with this name; None if there is none."""
        return next((bitmap for bitmap in self.bitmaps if bitmap.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A libvirt checkpoint: the instant since which written blocks are recorded."""

    name: str
    parent: str | None
    made_at: int
    """When the checkpoint was created, in seconds since 1970."""
    disks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Name of the bitmap of each disk that has one, by the disk's name."""

    @property
    def ours(self) -> bool:
        """Whether vmckpt created the checkpoint."""
        return self.name.startswith(MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOrder:
    """How to read one disk in a backup."""

    name: str
    since: str | None = None
    """Read only what was written since this checkpoint; None: read everything."""
    mark: bool = False
    """Record what is written from now on, for the next backup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupOrder:
    """A backup to be opened."""

    id: str
    """The snapshot's ID."""
    folder: str
    """Directory on the guest's host for the socket and the scratch files."""
    disks: tuple[DiskOrder, ...]
    left_out: tuple[str, ...] = ()
    """The guest's other disks, which must also be listed for libvirt."""
    scratch_made: bool = False
    """The scratch files already exist. Otherwise libvirt creates them, which prolongs a pause."""

    @property
    def checkpoint(self) -> str:
        return checkpoint_of(self.id)

    @property
    def socket(self) -> str:
        return f"{self.folder}/{self.checkpoint}.nbd"

    def scratch(self, disk: str) -> str:
        return f"{self.folder}/{self.checkpoint}.{disk}.scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDisk:
    """A disk in an open backup, with its content at the start of the backup."""

    name: str
    """Name of the disk and of its NBD export."""
    changed: str | None
    """NBD metadata context with the blocks written since the checkpoint; None: read everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBackup:
    """An open backup, which QEMU serves over NBD until the backup job ends."""

    socket: str
    """Path of the socket on the guest's host."""
    disks: tuple[OpenDisk, ...]
    ours: bool = True
    """Whether vmckpt opened the backup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """One store of the inventory."""

    name: str
    url: str
    """A directory with the same path on all hosts, or s3://bucket/prefix?endpoint=…"""
    id: str | None = None
    """The store's own ID, as read by the controller; None: not read."""


def line_folder(state: str, guest: str, store: str) -> Path:
    """Return the directory on a host for the state of a guest's chain in a store.

    `state`: the host's directory for agent state; `guest`: a UUID; `store`: the store's name.
    """
    return Path(state) / "lines" / f"{guest}-{store}"


def is_locked(said: str) -> bool:
    """Return whether an error from QEMU or qemu-img means that another process locked the image.

    The text is from raw_check_lock_bytes and raw_apply_lock_bytes in QEMU's block/file-posix.c.
    """
    return _LOCKED.search(said) is not None
