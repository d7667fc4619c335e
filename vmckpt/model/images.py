"""Disk images that are copied with a guest."""

from dataclasses import dataclass, field

from vmckpt.model.findings import Finding
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
class Wish:
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
