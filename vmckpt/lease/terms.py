"""For how long a lease on a protected guest is good: when its watchdog kills, when another may take
over. Pure.

The holder counts from when it *sent* its last renewal that was answered, by its own clock; others
count from when the witness *wrote* it, which is never earlier. So between the kill and the earliest
takeover lie two margins, and a renewal that is late, or whose answer is lost, only adds to that.
"""

from dataclasses import dataclass

from vmckpt.errors import BadInput
from vmckpt.units import Seconds, show_seconds

WATCHDOG_TURN = Seconds(0.05)
"""A watchdog looks at least this often."""
KILLED_IN = Seconds(0.25)
"""From a watchdog's SIGKILL until no processor of the guest runs: threads of QEMU in the kernel."""
DRIFT = 0.0005
"""How much faster or slower than time a clock may run: 500 ppm is what NTP corrects at most."""
SHORTEST = Seconds(1.0)
"""A shorter lease would be lost by an ordinary hiccup of a network or a disk."""
_SLOWEST = Seconds(1.0)
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What both ends keep to. Raises BadInput if they cannot be kept."""

    ttl: Seconds = Seconds(5.0)
    """For how long a renewal is good."""
    margin: Seconds = Seconds(1.0)
    """By how much the holder ends earlier, and others begin later."""

    def __post_init__(self) -> None:
        if not SHORTEST <= self.ttl <= 3600:
            raise BadInput(
                f"a lease of {show_seconds(self.ttl)} is not possible",
                hint=f"take between {show_seconds(SHORTEST)} and an hour",
            )
        least = least_margin(self.ttl)
        if not least <= self.margin <= self.ttl / 2:
            raise BadInput(
                f"a margin of {show_seconds(self.margin)} does not fit a lease of"
                f" {show_seconds(self.ttl)}",
                hint=f"take between {show_seconds(least)} and {show_seconds(self.ttl / 2)}",
            )

    @property
    def lasts(self) -> Seconds:
        """How long after it was sent a renewal lets the guest run; then the watchdog kills it."""
        return Seconds(self.ttl - self.margin)

    @property
    def waits(self) -> Seconds:
        """How long after it was written a renewal keeps others from taking over."""
        return Seconds(self.ttl + self.margin)

    @property
    def every(self) -> Seconds:
        """How often to renew, so that several may fail before the lease is lost."""
        return Seconds(min(_SLOWEST, self.lasts / _TRIES))

    @property
    def limit(self) -> Seconds:
        """How long to wait for an answer of the witness."""
        return Seconds(min(0.5, self.every))


def least_margin(ttl: Seconds) -> Seconds:
    """Half of what may pass between the end of a lease and the death of its guest."""
    late = WATCHDOG_TURN + KILLED_IN
    apart = 2 * DRIFT * 2 * ttl  # both clocks, over ttl + margin, which is less than 2 * ttl
    return Seconds((late + apart) / 2)
