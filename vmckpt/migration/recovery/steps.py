"""The steps of a migration in the journal: written down before each is taken.

Each name here has its undoing and its finishing in `migration.recovery.recover`.
"""

from enum import StrEnum


class Step(StrEnum):
    """What a migration does to hosts and guest."""

    IMAGES = "make-images"
    """Empty images on the target, for disks that are copied."""
    LIMITS = "set-limits"
    """What QEMU may aim for; {"max_downtime_ms": what was in force before}."""
    MOVE = "move"
    """libvirt's call; the order without the guest's definitions."""
    DRIVER = "driver"
    """The order is given once more, driven by the controller."""
    THROTTLE = "throttle"
    """How far QEMU may slow the guest down."""
    BANDWIDTH = "bandwidth"
    """A limit that was set while it ran."""
    PAUSE = "pause"
    """The guest was stopped so that its memory can be sent to the end."""
