"""Disk images, a guest's backups and checkpoints, and where snapshots are kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from vmckpt.model.finding import Finding
from vmckpt.units import Bytes

NVRAM = "nvram"
"""The drive of a firmware's variables, which no definition has among its disks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A drive as the guest's definition has it."""

    name: str
    """In the guest: "vda"."""
    kind: str
    """libvirt's source type: "file", "block", "network", …"""
    device: str
    """"disk", "cdrom", "floppy", "lun" or NVRAM."""
    path: str | None
    """None: empty, or not a path."""
    format: str
    read_only: bool
    encrypted: bool
    shareable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What the source's qemu-img says of an image."""

    size: Bytes
    """As the guest sees it."""
    allocated: Bytes
    """Room it takes now."""
    options: str
    """For `qemu-img create -o`, so that the copy is of the same make."""
    mode: str
    """Permissions, in octal."""
    backing: str | None = None
    data_file: str | None = None
    snapshots: int = 0
    """Kept inside the image."""
    damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an image is to be on the target."""

    exists: bool
    """Something has that name already."""
    writable: bool
    """Its folder is there and may be written to."""
    device: str
    """The file system's number."""
    free: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """What the operator wants copied, and how."""

    full: bool = False
    """All room is taken on the target; False: only what was ever written."""
    disks: tuple[str, ...] = ()
    """Only these ("vda"); none: all that are not shared."""
    folder: str | None = None
    """On the target; None: the same path as on the source."""
    remove: bool = False
    """The source's images go once the guest has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopy:
    """One disk that is copied."""

    name: str
    source: str
    path: str
    """On the target."""
    format: str
    size: Bytes
    needed: Bytes
    """Room it will take on the target at first."""
    allocated: Bytes
    """What of it was ever written, and travels."""
    full: bool
    options: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What copies take of one file system on the target."""

    device: str
    """Its number there."""
    folder: str
    """Of one of them."""
    free: Bytes
    needed: Bytes
    """At first."""
    grown: Bytes
    """Once everything is written that may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Which disks are copied, and everything against it."""

    copies: tuple[DiskCopy, ...] = ()
    findings: tuple[Finding, ...] = ()
    rest_shared: bool = True
    """Every disk that is written to and not copied was seen to be the same on both hosts."""
    rooms: tuple[Room, ...] = ()
    removes: bool = False
    """The source's images go once the guest has arrived."""

    @property
    def size(self) -> Bytes:
        """Of all copies, as the guest sees them."""
        return Bytes(sum(copy.size for copy in self.copies))

    @property
    def travels(self) -> Bytes:
        """What is sent of all copies: holes are not."""
        return Bytes(sum(copy.allocated for copy in self.copies))

    @property
    def disks(self) -> tuple[str, ...]:
        return tuple(copy.name for copy in self.copies)

    @property
    def placed(self) -> dict[str, str]:
        """Where each copied disk's image is on the target."""
        return {copy.name: copy.path for copy in self.copies}

    @property
    def room(self) -> dict[str, Bytes]:
        """Raw images that are to take all their room once the guest has arrived, by path."""
        full = [copy for copy in self.copies if copy.full and copy.format == "raw"]
        return {copy.path: copy.size for copy in full}

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Images on the source, where nobody uses them after the move."""
        return tuple(copy.source for copy in self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Images that were made on the target, each with a mark by which it is known again."""

    host: str
    suffix: str
    """Until its mark is in the journal, an image has its path with this behind it."""
    marks: dict[str, str] = field(default_factory=dict)
    """By path: file system, inode and time of birth; "": it was not made, or is not known."""

    def temporary(self, path: str) -> str:
        """Its name until it is known to the journal."""
        return f"{path}.{self.suffix}"


MARK = "vmckpt-"
"""What the names of our backups' files, checkpoints and bitmaps begin with."""


def checkpoint_of(snapshot: str) -> str:
    """libvirt's and QEMU's name for a snapshot's instant."""
    return MARK + snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap:
    """A note of which parts of a disk were written since it was made."""

    name: str
    recording: bool = True
    persistent: bool = True
    busy: bool = False
    inconsistent: bool = False
    """QEMU ended without writing it out."""

    @property
    def whole(self) -> bool:
        """Whether what it says can be relied on."""
        return self.recording and not self.busy and not self.inconsistent


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """A disk of a running guest."""

    name: str
    """In the guest: "vda"."""
    kind: str
    """libvirt's source type: "file", "block", "network", …"""
    device: str
    """"disk", "cdrom", "floppy" or "lun"."""
    format: str
    source: str | None
    """None: empty."""
    read_only: bool = False
    shareable: bool = False
    size: Bytes | None = None
    """None: QEMU does not tell."""
    version: int | None = None
    """Of a qcow2 image: 2 or 3; None: another format, or QEMU does not tell."""
    node: str | None = None
    """QEMU's name for it."""
    bitmaps: tuple[Bitmap, ...] = ()

    def bitmap(self, name: str) -> Bitmap | None:
        return next((bitmap for bitmap in self.bitmaps if bitmap.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """libvirt's word for an instant since which it knows what was written."""

    name: str
    parent: str | None
    made_at: int
    """Unix seconds."""
    disks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Disks with a bitmap for it, and that bitmap's name."""

    @property
    def ours(self) -> bool:
        return self.name.startswith(MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOrder:
    """How one disk is to be read."""

    name: str
    since: str | None = None
    """Only what was written since this checkpoint; None: all of it."""
    mark: bool = False
    """From now on it is noted what is written, for the next time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupOrder:
    """A backup that is to be opened."""

    id: str
    """The snapshot's."""
    folder: str
    """On the guest's host: for the socket, and for what the guest overwrites meanwhile."""
    disks: tuple[DiskOrder, ...]
    left_out: tuple[str, ...] = ()
    """The guest's other disks, which libvirt wants to be named."""
    scratch_made: bool = False
    """The scratch files are there; else libvirt makes them, and a stopped guest waits for it."""

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
    """A disk as it was when the backup began."""

    name: str
    """Of the disk and of its NBD export."""
    changed: str | None
    """NBD context that tells what was written since the checkpoint; None: all is to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBackup:
    """What a running QEMU serves, until the backup is ended."""

    socket: str
    """On the guest's host."""
    disks: tuple[OpenDisk, ...]
    ours: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """One store of the inventory."""

    name: str
    url: str
    """A folder that the hosts see under the same path, or s3://bucket/prefix?endpoint=…"""
    id: str | None = None
    """The store's own, as the controller has read it there; None: it was not looked at."""


def line_folder(state: str, guest: str, store: str) -> Path:
    """Where a host that keeps its state there has the line of a guest (its UUID) in a store."""
    return Path(state) / "lines" / f"{guest}-{store}"
