"""The clock that is used to measure leases."""

import time

from vmckpt.units import Seconds


def boottime() -> Seconds:
    """Return CLOCK_BOOTTIME in seconds.

    This clock is never set, and includes the time during which the machine is suspended.
    """
    return Seconds(time.clock_gettime(time.CLOCK_BOOTTIME))
