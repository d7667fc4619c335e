"""What a cell of docs/locking.md is made of."""

from dataclasses import dataclass
from enum import StrEnum


class Under(StrEnum):
    """What is under way."""

    PRECOPY = "vmckpt migrate, in pre-copy"
    POSTCOPY = "vmckpt migrate, in post-copy"
    ABANDONED = "vmckpt migrate, killed in pre-copy; libvirt continues"
    UNSETTLED = "vmckpt migrate, killed in pre-copy; libvirt's job has ended"
    BROKEN = "vmckpt migrate, post-copy broken, waiting for the operator"
    VIRSH_MIGRATE = "virsh migrate"
    SNAPSHOT = "virsh snapshot-create-as, memory and disk"
    DISK_SNAPSHOT = "virsh snapshot-create-as --disk-only"
    BACKUP = "virsh backup-begin"
    BLOCKCOPY = "virsh blockcopy"
    SAVE = "virsh save, managedsave"
    DUMP = "virsh dump"
    PROTECTED = "vmckpt protect"


class Asked(StrEnum):
    """What somebody asks for meanwhile."""

    MIGRATE = "vmckpt migrate"
    MIGRATE_ELSEWHERE = "vmckpt migrate with another journal"
    PLAN = "vmckpt plan"
    RESUME_JOB = "vmckpt resume"
    RECOVER = "vmckpt recover"
    CANCEL = "vmckpt cancel"
    SET = "vmckpt set"
    LABEL = "vmckpt label"
    GUESTS = "vmckpt guests"
    VIRSH_MIGRATE = "virsh migrate"
    SNAPSHOT = "virsh snapshot-create-as, memory and disk"
    DISK_SNAPSHOT = "virsh snapshot-create-as --disk-only"
    BACKUP = "virsh backup-begin"
    ATTACH_DISK = "virsh attach-disk"
    ATTACH_NIC = "virsh attach-device of an interface"
    SETMEM = "virsh setmem"
    SETVCPUS = "virsh setvcpus"
    SUSPEND = "virsh suspend"
    RESUME = "virsh resume"
    SHUTDOWN = "virsh shutdown"
    REBOOT = "virsh reboot"
    DESTROY = "virsh destroy"
    DESTROY_OTHER = "virsh destroy on the other host"
    UNDEFINE = "virsh undefine"
    DEFINE = "virsh define of a changed definition"
    MANAGEDSAVE = "virsh managedsave"
    DUMP = "virsh dump"
    BLOCKCOPY = "virsh blockcopy"
    ABORT = "virsh domjobabort"


class Answer(StrEnum):
    """What becomes of the request."""

    REFUSED = "refused"
    WAITS = "refused after 30 s"
    ALLOWED = "allowed"
    HARMS = "allowed, harmful"


@dataclass(frozen=True, slots=True)
class Then:
    """What comes of it."""

    text: str
    goes_on: bool = False
    """What was under way still is."""
    outcome: str | None = None
    """How the job of vmckpt ends."""
    stands: bool = False
    """The guest stands still."""
    alone: bool = False
    """The guest goes on without its standby, which is noted to be invalid."""
    transient: bool = False
    """libvirt keeps no definition of it any more."""
    on: str | None = None
    """Where the guest runs then; the ledgers must agree there."""
    left: str | None = None
    """Where something of it is left instead."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One request while something is under way."""

    under: Under
    asked: Asked
    answer: Answer
    code: int | None
    """Its exit code; None: 0 or 1, as it comes."""
    says: str
    then: Then
    quick: bool

    def __str__(self) -> str:
        return f"{self.under.name}-{self.asked.name}".lower().replace("_", "-")
