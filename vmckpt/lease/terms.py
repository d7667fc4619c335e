"""How long a lease on a protected guest is valid: when the watchdog kills the guest, and when
another host may take over. Pure.

The holder counts, by its own clock, from the moment at which it *sent* its last answered renewal.
Other hosts count from the moment at which the lease store *wrote* that renewal, which is never
earlier. So there are two margins between the kill and the earliest takeover. A renewal that is
late, or whose answer is lost, only increases this interval.
"""

from dataclasses import dataclass

from vmckpt.errors import BadInput
from vmckpt.units import Seconds, show_seconds

WATCHDOG_TURN = Seconds(0.05)
"""The longest interval between two checks of the lease by a watchdog."""
KILLED_IN = Seconds(0.25)
"""Time from the watchdog's SIGKILL until no processor runs the guest; QEMU may be in the kernel."""
DRIFT = 0.0005
"""Relative error of a clock's rate: NTP corrects at most 500 ppm."""
SHORTEST = Seconds(1.0)
"""A shorter lease could expire during an ordinary delay of the network or a disk."""
_SLOWEST = Seconds(1.0)
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Lifetime and margin of a lease, the same for its holder and for other hosts.

    Raises BadInput if either is out of range.
    """

    ttl: Seconds = Seconds(5.0)
    """How long a renewal is valid."""
    margin: Seconds = Seconds(1.0)
    """How much earlier the lease ends for its holder, and how much later for other hosts."""

    def __post_init__(self) -> None:
        if not SHORTEST <= self.ttl <= 3600:
            raise BadInput(
                f"invalid lease lifetime {show_seconds(self.ttl)}",
                hint=f"choose a lifetime between {show_seconds(SHORTEST)} and an hour",
            )
        least = least_margin(self.ttl)
        if not least <= self.margin <= self.ttl / 2:
            raise BadInput(
                f"invalid margin {show_seconds(self.margin)} for a lease lifetime of"
                f" {show_seconds(self.ttl)}",
                hint=f"choose a margin between {show_seconds(least)} and"
                f" {show_seconds(self.ttl / 2)}",
            )

    @property
    def lasts(self) -> Seconds:
        """How long the guest may run after a renewal was sent; then the watchdog kills it."""
        return Seconds(self.ttl - self.margin)

    @property
    def waits(self) -> Seconds:
        """How long other hosts must wait after a renewal was written; then they may take over."""
        return Seconds(self.ttl + self.margin)

    @property
    def every(self) -> Seconds:
        """Interval between renewals, short enough that several may fail before the lease ends."""
        return Seconds(min(_SLOWEST, self.lasts / _TRIES))

    @property
    def limit(self) -> Seconds:
        """How long to wait for an answer from the lease store."""
        return Seconds(min(0.5, self.every))


def least_margin(ttl: Seconds) -> Seconds:
    """Return half of the longest time between the end of a lease and the death of its guest."""
    late = WATCHDOG_TURN + KILLED_IN
    apart = 2 * DRIFT * 2 * ttl  # both clocks, over ttl + margin, which is less than 2 * ttl
    return Seconds((late + apart) / 2)
