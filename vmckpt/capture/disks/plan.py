"""Decide how each disk of a guest is read for a snapshot, and why. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from vmckpt.model.disk import BackupOrder, Checkpoint, DiskFacts, DiskOrder, checkpoint_of
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import Bytes

_READABLE = ("file", "block", "network", "volume", "nvme")


class How(StrEnum):
    """A method of reading a disk."""

    FULL = "full"
    INCREMENTAL = "incremental"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The snapshot since which libvirt tracks the guest's disk writes."""

    id: str
    made_at: int
    sizes: Mapping[str, Bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Size of each disk in the snapshot, by disk name."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Image path of each disk in the snapshot, by disk name, if known."""

    @property
    def checkpoint(self) -> str:
        return checkpoint_of(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decision about one disk."""

    name: str
    how: How
    mark: bool = False
    """Whether to start a new bitmap, so that the next snapshot can be incremental."""
    code: str = "disk-read"
    reason: str
    expected: bool = True
    """False if the decision must be reported to the operator as a warning."""
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """The decisions about all disks of a guest."""

    since: str | None
    """The checkpoint from which disks are read incrementally; None if there is no parent."""
    choices: tuple[Choice, ...]
    redefine: tuple[Checkpoint, ...] = ()
    """Checkpoints that libvirt has lost although their bitmaps exist; define them again first."""

    def findings(self, guest: str) -> tuple[Finding, ...]:
        """Return a finding for each disk."""
        return tuple(
            Finding(
                code=choice.code,
                severity=Severity.INFO if choice.expected else Severity.WARNING,
                where=guest,
                text=f"disk {choice.name}: {_WORDS[choice.how]}: {choice.reason}",
                hint=choice.hint,
            )
            for choice in self.choices
        )

    @property
    def captured(self) -> bool:
        """Whether any disk is captured."""
        return any(choice.how is not How.LEFT_OUT for choice in self.choices)

    def order(self, snapshot: str, folder: str) -> BackupOrder:
        """Return the backup to request from libvirt. `folder`: a directory on the guest's host."""
        return BackupOrder(
            id=snapshot,
            folder=folder,
            disks=tuple(
                DiskOrder(
                    name=choice.name,
                    since=self.since if choice.how is How.INCREMENTAL else None,
                    mark=choice.mark,
                )
                for choice in self.choices
                if choice.how is not How.LEFT_OUT
            ),
            left_out=tuple(c.name for c in self.choices if c.how is How.LEFT_OUT),
        )

    def whole(self, disk: str | None, reason: str) -> "DiskPlan":
        """Return the plan with full instead of incremental reads of `disk`; None: of all disks."""
        return replace(
            self,
            choices=tuple(
                replace(
                    choice, how=How.FULL, code="disk-bitmap-lost", reason=reason, expected=False
                )
                if choice.how is How.INCREMENTAL and disk in (choice.name, None)
                else choice
                for choice in self.choices
            ),
        )


_WORDS = {
    How.FULL: "full read",
    How.INCREMENTAL: "incremental read",
    How.LEFT_OUT: "not captured",
}


def plan(
    disks: Sequence[DiskFacts], parent: Parent | None, known: Sequence[Checkpoint]
) -> DiskPlan:
    """Decide how to read each disk. `known`: libvirt's checkpoints of the guest."""
    choices = tuple(_choose(disk, parent) for disk in disks)
    return DiskPlan(
        since=parent.checkpoint if parent is not None else None,
        choices=choices,
        redefine=_unknown(choices, parent, known),
    )


def _unknown(
    choices: Sequence[Choice], parent: Parent | None, known: Sequence[Checkpoint]
) -> tuple[Checkpoint, ...]:
    """Return the parent's checkpoint if it is needed and libvirt lost it, as after a migration.

    Otherwise, the result is empty.
    """
    followed = [choice.name for choice in choices if choice.how is How.INCREMENTAL]
    if parent is None or not followed or any(one.name == parent.checkpoint for one in known):
        return ()
    names = [one.name for one in known]
    return (
        Checkpoint(
            name=parent.checkpoint,
            parent=names[-1] if names else None,
            made_at=parent.made_at,
            disks=dict.fromkeys(followed, parent.checkpoint),
        ),
    )


def _choose(disk: DiskFacts, parent: Parent | None) -> Choice:
    choice = _out(disk) or _without_bitmaps(disk) or _followed(disk, parent)
    if choice.how is How.LEFT_OUT or (disk.kind == "file" and disk.format != "luks"):
        return choice
    # Snapshots of any other disk can be browsed but not restored; the operator must be warned.
    what = "an encrypted disk" if disk.kind == "file" else f"a disk of type {disk.kind}"
    return replace(
        choice,
        code="disk-not-restorable",
        reason=f"{choice.reason}; {what} cannot be restored, only browsed",
        expected=False,
        hint="use a qcow2 or raw file to make the disk restorable",
    )


def _out(disk: DiskFacts) -> Choice | None:
    """Choose to leave out a disk that is not part of the guest's own state or cannot be read.

    Returns None for all other disks.
    """

    def out(reason: str, *, expected: bool, hint: str | None = None) -> Choice:
        return Choice(
            name=disk.name, how=How.LEFT_OUT, code="disk-left-out", reason=reason,
            expected=expected, hint=hint,
        )  # fmt: skip

    if disk.source is None:
        return out("the drive is empty", expected=True)
    if disk.device in ("cdrom", "floppy"):
        return out(f"it is a {disk.device}", expected=True)
    if disk.read_only:
        return out("the guest cannot write to it", expected=True)
    if disk.shareable:
        return out("other guests may write to it at the same time", expected=False)
    if disk.device == "lun":
        return out("its SCSI commands bypass QEMU", expected=False)
    if disk.kind not in _READABLE:
        return out(f"its data does not pass through QEMU ({disk.kind})", expected=False)
    return None


def _without_bitmaps(disk: DiskFacts) -> Choice | None:
    """Choose a full read if the disk's image cannot have bitmaps. Returns None otherwise."""
    if disk.format != "qcow2":
        return Choice(
            name=disk.name, how=How.FULL, reason=f"{disk.format} images cannot hold a bitmap"
        )
    if disk.version == 2:
        return Choice(
            name=disk.name, how=How.FULL, code="disk-old-qcow2", expected=False,
            reason="its qcow2 image has version 2, which cannot hold a bitmap",
            hint=f"with the guest off, run qemu-img amend -f qcow2 -o compat=1.1 {disk.source}",
        )  # fmt: skip
    return None


def _followed(disk: DiskFacts, parent: Parent | None) -> Choice:
    """Choose an incremental read if the parent's bitmap is valid for the disk, else a full read."""

    def full(reason: str, *, expected: bool, code: str = "disk-read") -> Choice:
        return Choice(
            name=disk.name, how=How.FULL, mark=True, reason=reason, expected=expected, code=code
        )

    if parent is None:
        return full("there is no earlier snapshot with a bitmap", expected=True)
    before = parent.sizes.get(disk.name)
    bitmap = disk.bitmap(parent.checkpoint)
    if before is None:
        return full(f"the disk was not in snapshot {parent.id}", expected=True)
    if disk.size is not None and disk.size != before:
        return full(
            f"its size was {before} bytes in snapshot {parent.id} and is {disk.size} now",
            expected=False, code="disk-resized",
        )  # fmt: skip
    was = next((name for name, one in parent.sources.items() if one == disk.source), disk.name)
    if was != disk.name:
        return full(
            f"its image belonged to disk {was} in snapshot {parent.id}", expected=False,
            code="disk-swapped",
        )  # fmt: skip
    if bitmap is None:
        why = f"its bitmap for snapshot {parent.id} is missing"
        return full(why, expected=False, code="disk-bitmap-lost")
    if bitmap.inconsistent:
        why = f"QEMU exited without saving its bitmap for snapshot {parent.id}"
        return full(why, expected=False, code="disk-bitmap-lost")
    if not bitmap.whole:
        why = f"its bitmap for snapshot {parent.id} is in use or disabled"
        return full(why, expected=False, code="disk-bitmap-lost")
    return Choice(
        name=disk.name, how=How.INCREMENTAL, mark=True, reason=f"changes since {parent.id}"
    )
