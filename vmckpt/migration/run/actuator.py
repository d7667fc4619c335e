"""Carry out decisions, and restore the settings of a guest that stays on the source."""

from collections.abc import Awaitable, Callable

from vmckpt.errors import HypervisorError
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    SetXbzrleCache,
    SwitchToPostcopy,
)
from vmckpt.model.migration import AutoConverge, MigrationDriver, MoveOrder
from vmckpt.units import Seconds


class Actuator:
    """Carries out actions on the guest of one migration."""

    def __init__(self, migrations: MigrationDriver) -> None:
        self._migrations = migrations
        self._usual: Seconds | None = None
        self._throttled = False
        self._limited = False

    async def prepare(
        self,
        max_downtime: Seconds,
        throttle: AutoConverge | None,
        warn: Callable[[str], None],
    ) -> None:
        """Set QEMU's downtime limit, and how far QEMU may throttle the guest.

        `throttle`: None: unchanged. Raises HypervisorError after restoring the settings.
        """
        self._usual = await self._migrations.max_downtime()
        try:
            await self._migrations.set_max_downtime(max_downtime)
            if throttle is not None:
                self._throttled = True
                await self._migrations.throttle(throttle)
        except HypervisorError:
            await self.restore(warn)
            raise

    async def apply(self, action: Action) -> None:
        """Carry out an action. Raises HypervisorError or OutcomeUnknown."""
        match action:
            case SetDowntime(limit):
                await self._migrations.set_max_downtime(limit)
            case SetThrottle(how):
                self._throttled = True
                await self._migrations.throttle(how)
            case SetXbzrleCache(size):
                await self._migrations.set_cache(size)
            case LimitBandwidth(rate):
                self._limited = True
                await self._migrations.set_bandwidth(rate, post_copy=False)
                await self._migrations.set_bandwidth(rate, post_copy=True)
            case SwitchToPostcopy():
                await self._migrations.start_post_copy()
            case PauseGuest():
                await self._migrations.pause_guest()
            case Abort():
                await self._migrations.abort()

    async def restore(self, warn: Callable[[str], None]) -> None:
        """Restore the settings of a guest that stays; warn about those that cannot be restored."""
        if self._throttled:
            await _tried(self._migrations.throttle(None), warn, "the CPU throttle")
        if self._limited:
            await _tried(
                self._migrations.set_bandwidth(None, post_copy=False), warn, "the bandwidth limit"
            )
        if self._usual is not None:
            await _tried(self._migrations.set_max_downtime(self._usual), warn, "the downtime limit")

    async def arrived(self, order: MoveOrder, warn: Callable[[str], None]) -> None:
        """Set autostart on the target, and undefine the guest on the source, if `order` says so.

        Call this after the guest has arrived. Failures become warnings.
        """
        try:
            if order.autostart:
                await self._migrations.set_autostart()
        except HypervisorError as exc:
            warn(
                f"autostart may not be set on the target ({exc.message}); run virsh autostart GUEST"
                " there"
            )
        try:
            if order.persistent:
                await self._migrations.undefine_on_source()
        except HypervisorError as exc:
            warn(f"the old definition may still be on the source: {exc.message}")


async def _tried(work: Awaitable[None], warn: Callable[[str], None], what: str) -> None:
    try:
        await work
    except HypervisorError as exc:
        warn(f"{what} of the guest's QEMU may not have been restored: {exc.message}")
