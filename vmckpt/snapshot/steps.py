"""The steps of a snapshot in the journal; `settling` has how each is undone."""

from enum import StrEnum


class Step(StrEnum):
    """What taking a snapshot does to a host, a guest and a store."""

    TAKE = "take"
    """An agent is started; {"snapshot", "store", "url", "id", "state"}; "id" is the store's."""
    CAPTURE = "capture"
    """QEMU is set up for a capture; {"facts"}: what was so before."""
    BACKUP = "backup"
    """libvirt opens a backup; {"facts"}: what it leaves behind."""
    FREEZE = "freeze"
    """The guest's file systems are held still; {"facts"}."""
    HOLD = "hold"
    """What the guest sends is held; {"facts"}."""

    RESTORE = "restore"
    """Disks are written and a guest started; {"snapshot", "store", "url", "state", "images"}, and
    "memory" if it is to be started from it, "on_restore" if something is to follow."""
    MAKE_WAY = "make way"
    """What is there is ended and put aside; {"made", "empty"}: marks of the new images, and where
    nothing was before. Without this step nothing of what is there was touched."""
    HOOK = "hook"
    """What is to follow is run, here: {"on_restore"}."""

    GUARD = "guard"
    """A risky command is run; {"snapshot", "store", "command"}."""
    PROOF = "proof"
    """A fork is restored to be looked at only; {"snapshot", "fork", "images"}."""


NOTED = (Step.CAPTURE, Step.BACKUP, Step.FREEZE, Step.HOLD)
"""Those that the agent asks for, with what its undoing needs to know."""
