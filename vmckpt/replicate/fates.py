"""How a protection ended, as the agents leave word of it for the controller. Pure."""

from enum import StrEnum


class Fate(StrEnum):
    """What became of the guest, or of its standby."""

    FAILED_OVER = "failed-over"
    """It runs on the backup."""
    SWITCHED = "switched"
    """It went over as planned: the primary's word for it."""
    ENDED = "ended"
    """By somebody's wish."""
    DIED = "died"
    """Its QEMU did, on the primary."""
    LOST = "lost"
    """The standby's QEMU is gone."""
