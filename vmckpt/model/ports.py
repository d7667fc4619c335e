"""What the engines need of the outside world, and no more."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vmckpt.model.guests import Presence
from vmckpt.model.jobs import JobSample, JobTotals
from vmckpt.units import BytesPerSecond, Seconds


class Driver(StrEnum):
    """Who drives a migration."""

    PEER_TO_PEER = "peer-to-peer"
    """The source's libvirtd: it goes on when the controller dies."""
    CLIENT = "client-driven"
    """The controller: it ends, without harm, when the controller dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """Everything libvirt must be told to move a guest."""

    driver: Driver
    persistent: bool
    """The guest is defined on the source: define it on the target and not on the source."""
    autostart: bool
    """Start the guest with the target host from now on; libvirt does not carry that over."""
    storage_proven: bool
    """The disks were seen to be the same files on both hosts, so libvirt need not doubt it."""
    bandwidth: BytesPerSecond | None
    """None: no limit."""


class Mover(Protocol):
    """What a migration may do to the one guest it moves."""

    async def move(self, order: MoveOrder) -> None:
        """Migrate. Returns when the guest runs on the target.

        Raises PeerLoginFailed if the source could not log in at the target (nothing happened),
        HypervisorError if libvirt says it failed, OutcomeUnknown if the connection broke.
        """

    async def sample(self) -> JobSample | None:
        """The job's statistics now; None if no migration job runs."""

    async def totals(self) -> JobTotals | None:
        """Statistics of the completed migration, from the target; None if they are gone."""

    async def abort(self) -> None:
        """Abort the running job; no error if it has ended."""

    async def set_autostart(self) -> None:
        """Start the guest with the target host from now on."""

    async def set_max_downtime(self, limit: Seconds) -> None:
        """Let QEMU switch over once it expects a downtime of at most `limit`."""

    async def max_downtime(self) -> Seconds:
        """The limit in force now."""

    async def presence(self) -> tuple[Presence, Presence]:
        """What source and target say about the guest now."""


class OutsideView(Protocol):
    """Somebody who watches a guest from outside, by a clock that does not stop with it."""

    async def blackout(self, guest: str, since: Seconds, until: Seconds) -> Seconds | None:
        """The longest silence in a window of monotonic time; None if the guest is not watched."""
