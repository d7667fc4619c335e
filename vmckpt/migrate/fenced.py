"""A mover that changes nothing once its controller no longer holds the guest's lease."""

from collections.abc import Callable

from vmckpt.model.guest import Presence
from vmckpt.model.migration import AutoConverge, JobSample, JobTotals, MoveOrder, Mover
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class FencedMover:
    """Asks `check` right before each call that changes something; reading is always allowed.

    `check` raises LeaseLost when somebody else has taken over, and HypervisorError while it cannot
    be known.
    """

    def __init__(self, mover: Mover, check: Callable[[], None]) -> None:
        self._mover = mover
        self._check = check

    async def move(self, order: MoveOrder) -> None:
        self._check()
        await self._mover.move(order)

    async def abort(self) -> None:
        self._check()
        await self._mover.abort()

    async def set_autostart(self) -> None:
        self._check()
        await self._mover.set_autostart()

    async def set_max_downtime(self, limit: Seconds) -> None:
        self._check()
        await self._mover.set_max_downtime(limit)

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        self._check()
        await self._mover.set_bandwidth(limit, post_copy=post_copy)

    async def throttle(self, how: AutoConverge | None) -> None:
        self._check()
        await self._mover.throttle(how)

    async def set_cache(self, size: Bytes) -> None:
        self._check()
        await self._mover.set_cache(size)

    async def halt(self) -> None:
        self._check()
        await self._mover.halt()

    async def start_post_copy(self) -> None:
        self._check()
        await self._mover.start_post_copy()

    async def free_target(self) -> None:
        self._check()
        await self._mover.free_target()

    async def forget_source(self) -> bool:
        self._check()
        return await self._mover.forget_source()

    async def forget_target(self) -> bool:
        self._check()
        return await self._mover.forget_target()

    async def sample(self) -> JobSample | None:
        return await self._mover.sample()

    async def totals(self) -> JobTotals | None:
        return await self._mover.totals()

    async def max_downtime(self) -> Seconds:
        return await self._mover.max_downtime()

    async def stream_given_up(self) -> bool:
        return await self._mover.stream_given_up()

    async def presence(self) -> tuple[Presence, Presence]:
        return await self._mover.presence()
