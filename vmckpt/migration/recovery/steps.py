"""The steps of a migration in the journal. Each step is recorded before it is carried out.

`migration.recovery.recover` undoes or finishes each of these steps.
"""

from enum import StrEnum


class Step(StrEnum):
    """A change that a migration makes to the hosts or the guest."""

    IMAGES = "make-images"
    """Create empty images on the target for the disks to be copied."""
    LIMITS = "set-limits"
    """Set QEMU's limits. The intent has "max_downtime_ms", the downtime limit before the migration,
    and "throttle", whether QEMU may throttle the guest from the start."""
    MOVE = "move"
    """Start the migration in libvirt. The intent has the order without the guest's definitions, and
    the facts that recovery needs."""
    DRIVER = "driver"
    """Give the order again, with the controller's libvirt client as the driver."""
    THROTTLE = "throttle"
    """Set how far QEMU may throttle the guest."""
    BANDWIDTH = "bandwidth"
    """Set a bandwidth limit while the migration is running."""
    PAUSE = "pause"
    """Pause the guest so that the rest of its memory can be sent."""
