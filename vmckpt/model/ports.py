"""What the engines need of the outside world, and no more."""

from typing import Protocol

from vmckpt.model.guests import Presence
from vmckpt.model.jobs import JobSample, JobTotals
from vmckpt.model.orders import AutoConverge, MoveOrder
from vmckpt.units import Bytes, BytesPerSecond, Seconds


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

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        """Limit the job's stream, before or after the switch to post-copy; None: no limit."""

    async def throttle(self, how: AutoConverge | None) -> None:
        """Let QEMU slow the guest down, in a job that was started for it; None: as QEMU came."""

    async def set_cache(self, size: Bytes) -> None:
        """Give a job that was started with xbzrle a cache of that size."""

    async def halt(self) -> None:
        """Stop the guest; libvirt starts it on the target, or here if the migration fails."""

    async def start_post_copy(self) -> None:
        """Run the guest on the target now. There is no way back."""

    async def stream_given_up(self) -> bool:
        """Whether the source's QEMU has given a post-copy's stream up: then it can be resumed."""

    async def free_target(self) -> None:
        """Make the target let go of a dead stream as well; no error if there is none."""

    async def forget_source(self) -> bool:
        """Undefine what a completed migration left shut off on the source; whether it did."""

    async def forget_target(self) -> bool:
        """Undefine what a failed migration left shut off on the target; whether it did."""

    async def presence(self) -> tuple[Presence, Presence]:
        """What source and target say about the guest now."""


class OutsideView(Protocol):
    """Somebody who watches a guest from outside, by a clock that does not stop with it."""

    async def blackout(self, guest: str, since: Seconds, until: Seconds) -> Seconds | None:
        """The longest silence in a window of monotonic time; None if the guest is not watched."""
