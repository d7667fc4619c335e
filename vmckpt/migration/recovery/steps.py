"""The steps of a migration in the journal. Each is recorded before it is taken.

`migration.recovery.recover` undoes or finishes each of these steps.
"""

from enum import StrEnum


class Step(StrEnum):
    """What a migration does to hosts and guest."""

    IMAGES = "make-images"
    """Empty images on the target, for disks that are copied."""
    LIMITS = "set-limits"
    """Limits of QEMU. {"max_downtime_ms": the value before the migration}."""
    MOVE = "move"
    """The call of libvirt. Holds the order, without the guest's definitions."""
    DRIVER = "driver"
    """The order is given again, driven by the controller."""
    THROTTLE = "throttle"
    """How far QEMU may slow the guest down."""
    BANDWIDTH = "bandwidth"
    """A bandwidth limit that was set during the migration."""
    PAUSE = "pause"
    """The guest was paused so that the rest of its memory can be sent."""
