"""How each disk of a guest is to be read for a snapshot, and why. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from vmckpt.model.disk import BackupOrder, Checkpoint, DiskFacts, DiskOrder, checkpoint_of
from vmckpt.model.finding import Finding, Severity
from vmckpt.units import Bytes

_READABLE = ("file", "block", "network", "volume", "nvme")


class How(StrEnum):
    """What is done with a disk."""

    FULL = "full"
    INCREMENTAL = "incremental"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The last snapshot of the line."""

    id: str
    made_at: int
    sizes: Mapping[str, Bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Of the disks that it has."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Their images, as far as they are known."""

    @property
    def checkpoint(self) -> str:
        return checkpoint_of(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done with one disk."""

    name: str
    how: How
    mark: bool = False
    """Its next snapshot may be an incremental one."""
    code: str = "disk-read"
    reason: str
    expected: bool = True
    """False: the operator should hear of it."""
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """All disks of a guest."""

    since: str | None
    """The checkpoint that incremental ones begin with."""
    choices: tuple[Choice, ...]
    redefine: tuple[Checkpoint, ...] = ()
    """What libvirt must be told of first: the bitmaps are there, its notes are not."""

    def findings(self, guest: str) -> tuple[Finding, ...]:
        """What to tell, one line for each disk."""
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
        """Whether any disk is."""
        return any(choice.how is not How.LEFT_OUT for choice in self.choices)

    def order(self, snapshot: str, folder: str) -> BackupOrder:
        """The backup that carries it out; `folder` is on the guest's host."""
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
        """The same with a disk read whole after all; None: every one of them."""
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
    How.FULL: "read whole",
    How.INCREMENTAL: "only what changed is read",
    How.LEFT_OUT: "not captured",
}


def plan(
    disks: Sequence[DiskFacts], parent: Parent | None, known: Sequence[Checkpoint]
) -> DiskPlan:
    """Decide for each disk. `known` are libvirt's checkpoints of this guest."""
    choices = tuple(_choose(disk, parent) for disk in disks)
    return DiskPlan(
        since=parent.checkpoint if parent is not None else None,
        choices=choices,
        redefine=_unknown(choices, parent, known),
    )


def _unknown(
    choices: Sequence[Choice], parent: Parent | None, known: Sequence[Checkpoint]
) -> tuple[Checkpoint, ...]:
    """The parent's checkpoint if libvirt has lost its notes of it, as after a migration."""
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
    # It can be looked into, and that is worth having; but nobody should count on more.
    what = "an encrypted" if disk.kind == "file" else f"a {disk.kind}"
    return replace(
        choice,
        code="disk-not-restorable",
        reason=f"{choice.reason}; {what} disk cannot be restored by this vmckpt, only looked into",
        expected=False,
        hint="keep it in a qcow2 or raw file to have it restored",
    )


def _out(disk: DiskFacts) -> Choice | None:
    """A disk that is no part of the guest's own state, or cannot be read."""

    def out(reason: str, *, expected: bool, hint: str | None = None) -> Choice:
        return Choice(
            name=disk.name, how=How.LEFT_OUT, code="disk-left-out", reason=reason,
            expected=expected, hint=hint,
        )  # fmt: skip

    if disk.source is None:
        return out("it is empty", expected=True)
    if disk.device in ("cdrom", "floppy"):
        return out(f"it is a {disk.device}", expected=True)
    if disk.read_only:
        return out("the guest cannot write to it", expected=True)
    if disk.shareable:
        return out("other guests may write to it at the same time", expected=False)
    if disk.device == "lun":
        return out("its SCSI commands go past QEMU", expected=False)
    if disk.kind not in _READABLE:
        return out(f"QEMU does not read it itself ({disk.kind})", expected=False)
    return None


def _without_bitmaps(disk: DiskFacts) -> Choice | None:
    """A disk of which nobody can note what is written."""
    if disk.format != "qcow2":
        return Choice(
            name=disk.name, how=How.FULL, reason=f"{disk.format} images cannot hold a bitmap"
        )
    if disk.version == 2:
        return Choice(
            name=disk.name, how=How.FULL, code="disk-old-qcow2", expected=False,
            reason="its qcow2 image is of version 2, which cannot hold a bitmap",
            hint=f"with the guest off, run qemu-img amend -f qcow2 -o compat=1.1 {disk.source}",
        )  # fmt: skip
    return None


def _followed(disk: DiskFacts, parent: Parent | None) -> Choice:
    """A disk with bitmaps: is the parent's still good?"""

    def full(reason: str, *, expected: bool, code: str = "disk-read") -> Choice:
        return Choice(
            name=disk.name, how=How.FULL, mark=True, reason=reason, expected=expected, code=code
        )

    if parent is None:
        return full("no snapshot before it that could be continued", expected=True)
    before = parent.sizes.get(disk.name)
    bitmap = disk.bitmap(parent.checkpoint)
    if before is None:
        return full(f"it was not in snapshot {parent.id}", expected=True)
    if disk.size is not None and disk.size != before:
        return full(
            f"it had {before} bytes in snapshot {parent.id} and has {disk.size} now",
            expected=False, code="disk-resized",
        )  # fmt: skip
    was = next((name for name, one in parent.sources.items() if one == disk.source), disk.name)
    if was != disk.name:
        return full(
            f"its image was that of {was} in snapshot {parent.id}", expected=False,
            code="disk-swapped",
        )  # fmt: skip
    if bitmap is None:
        why = f"its bitmap of snapshot {parent.id} is lost"
        return full(why, expected=False, code="disk-bitmap-lost")
    if bitmap.inconsistent:
        why = f"QEMU ended without writing out its bitmap of snapshot {parent.id}"
        return full(why, expected=False, code="disk-bitmap-lost")
    if not bitmap.whole:
        why = f"its bitmap of snapshot {parent.id} is in use or was switched off"
        return full(why, expected=False, code="disk-bitmap-lost")
    return Choice(
        name=disk.name, how=How.INCREMENTAL, mark=True, reason=f"since snapshot {parent.id}"
    )
