"""Ending a migration job on the source, until it is seen to have ended."""

import asyncio
from collections.abc import Callable

from vmckpt.errors import HypervisorError
from vmckpt.model.migration import Mover
from vmckpt.units import Seconds

# An abort that came before the job could be aborted is given again; so is one that got lost.
_AGAIN = Seconds(0.5)
_WORKS = Seconds(120.0)


class Aborting:
    """The aborts of one migration."""

    def __init__(self, mover: Mover, warn: Callable[[str], None]) -> None:
        self._mover = mover
        self._warn = warn
        self._first: Seconds | None = None
        self._last = Seconds(0.0)

    @property
    def in_vain(self) -> bool:
        """It has had no effect for so long that there will be none: say what is known."""
        return self._first is not None and _now() - self._first > _WORKS

    async def abort(self) -> None:
        """Abort, unless that was done a moment ago."""
        if _now() - self._last < _AGAIN:
            return
        self._last = _now()
        self._first = self._first or _now()
        try:
            await self._mover.abort()
        except HypervisorError as exc:
            self._warn(f"the abort was not taken: {exc.message}")


def _now() -> Seconds:
    return Seconds(asyncio.get_running_loop().time())
