"""The clock that leases are measured with."""

import time

from vmckpt.units import Seconds


def boottime() -> Seconds:
    """Return CLOCK_BOOTTIME in seconds.

    That clock is never set, and counts the time for which the machine is suspended.
    """
    return Seconds(time.clock_gettime(time.CLOCK_BOOTTIME))
