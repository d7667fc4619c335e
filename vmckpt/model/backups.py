"""A guest's disks as a backup sees them, and the backups and checkpoints that libvirt keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vmckpt.units import Bytes

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
