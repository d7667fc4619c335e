"""Carry out decisions, and restore what was set on a guest that stays."""

from collections.abc import Awaitable, Callable

from vmckpt.errors import HypervisorError
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    Cache,
    Halt,
    Limit,
    SetDowntime,
    Slow,
    Switch,
)
from vmckpt.model.migration import AutoConverge, MoveOrder, Mover
from vmckpt.units import Seconds


class Hands:
    """Acts on the one guest of a migration."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._usual: Seconds | None = None
        self._throttled = False
        self._limited = False

    async def prepare(
        self,
        max_downtime: Seconds,
        throttle: AutoConverge | None,
        warn: Callable[[str], None],
    ) -> None:
        """Set the downtime that QEMU may aim for, and how far it may slow the guest down.

        Raises HypervisorError; what was set is set back then.
        """
        self._usual = await self._mover.max_downtime()
        try:
            await self._mover.set_max_downtime(max_downtime)
            if throttle is not None:
                self._throttled = True
                await self._mover.throttle(throttle)
        except HypervisorError:
            await self.put_back(warn)
            raise

    async def act(self, action: Action) -> None:
        """Raises HypervisorError or OutcomeUnknown."""
        match action:
            case SetDowntime(limit):
                await self._mover.set_max_downtime(limit)
            case Slow(how):
                self._throttled = True
                await self._mover.throttle(how)
            case Cache(size):
                await self._mover.set_cache(size)
            case Limit(rate):
                self._limited = True
                await self._mover.set_bandwidth(rate, post_copy=False)
                await self._mover.set_bandwidth(rate, post_copy=True)
            case Switch():
                await self._mover.start_post_copy()
            case Halt():
                await self._mover.halt()
            case Abort():
                await self._mover.abort()

    async def put_back(self, warn: Callable[[str], None]) -> None:
        """The guest stays: what we set on its QEMU is set back, or named."""
        if self._throttled:
            await _tried(self._mover.throttle(None), warn, "the CPU throttle")
        if self._limited:
            await _tried(self._mover.set_bandwidth(None, post_copy=False), warn, "the bandwidth")
        if self._usual is not None:
            await _tried(self._mover.set_max_downtime(self._usual), warn, "the downtime limit")

    async def arrived(self, order: MoveOrder, warn: Callable[[str], None]) -> None:
        """The guest runs on the target: do what libvirt leaves to us."""
        try:
            if order.autostart:
                await self._mover.set_autostart()
        except HypervisorError as exc:
            warn(f"it does not start with its new host yet, run virsh autostart: {exc.message}")
        try:
            if order.persistent:
                await self._mover.forget_source()
        except HypervisorError as exc:
            warn(f"its old definition is still on the source: {exc.message}")


async def _tried(work: Awaitable[None], warn: Callable[[str], None], what: str) -> None:
    try:
        await work
    except HypervisorError as exc:
        warn(f"{what} of the guest's QEMU could not be set back: {exc.message}")
