"""The clock that leases and their holders are measured by."""

import time

from vmckpt.units import Seconds


def boottime() -> Seconds:
    """A clock that is never set and goes on while the machine sleeps."""
    return Seconds(time.clock_gettime(time.CLOCK_BOOTTIME))
