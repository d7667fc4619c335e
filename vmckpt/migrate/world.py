"""What a simulated migration depends on, and what comes out. Pure data."""

from dataclasses import dataclass

from vmckpt.migrate.converge import Done, Verdict
from vmckpt.migrate.dirtying import DirtyCurve
from vmckpt.migrate.track import Track
from vmckpt.units import Seconds

SLICE = Seconds(0.05)
"""QEMU sends so long before it looks at what is left (ram.c, MAX_WAIT)."""
LIMITED_SLICE = Seconds(0.1)
"""The same under a bandwidth limit (qemu-file.c, BUFFER_DELAY)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One guess at everything that a migration depends on."""

    in_use: float
    """Bytes of pages that are not all zero."""
    memory: float
    curve: DirtyCurve
    bandwidth: float
    """Bytes per second in the first pass, for which the target must make room page by page."""
    later_bandwidth: float
    """In those after it: no less, and more where the link is not what holds it up."""
    postcopy_bandwidth: float
    setup: float
    """Seconds from the order to the first pass."""
    backlog: float
    """Bytes that wait in sockets: QEMU takes them for sent, the guest stands still for them."""
    stop: float
    """Seconds of a switchover beside the sending: device state, libvirt's handshake."""
    overshoot: float = 0.5
    """How far into its last slice a first pass gets before QEMU looks, 0 to 1."""
    tail: tuple[tuple[float, float], ...] = ()
    """(bytes from the end of memory, of which in use), rising; empty: not known."""
    stopping: float = 0.0
    """Seconds from a time limit to the moment when the guest was seen to have stayed."""
    slice_: float = SLICE
    zero_scan: float = 0.0
    """Seconds for looking at pages of zeros."""
    differences: float = 1.0
    """What xbzrle leaves of a page that is sent again."""
    faults: float = 1.0
    """How much longer the rest takes in post-copy than in one go."""
    waits: float = 10.0
    """Pages that a guest in post-copy must wait for, one after the other, before it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Something that the policy would do."""

    at: Seconds
    """Since the order."""
    action: str
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """How it would go."""

    completed: bool
    total: Seconds
    """From the order to the end; infinite if it never ends."""
    downtime: Seconds | None
    """None: the guest was not moved. In post-copy until it answers, not until it runs."""
    sent: float
    """Bytes."""
    passes: int
    switched: bool = False
    """It ended by post-copy."""
    planned: tuple[Planned, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A migration that is under way, to be played on from there."""

    track: Track
    done: Done
    now: Seconds
    """The clock of the track."""
    left: float
    """Bytes that are left in the pass."""
    sent: float
    verdict: Verdict | None = None
    """What was decided there and is still to be done."""
