"""Where guests that are restored together wait for each other."""

import asyncio

from vmckpt.errors import WaitedInVain


class Gate:
    """All of a group come to it several times, and go on when all are here.

    Unlike with asyncio.Barrier, nobody who was let through is told afterwards that it has failed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._here = 0
        self._failed = False
        self._opens: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def all_here(self, meanwhile: str) -> None:
        """Wait for the others. `meanwhile`: how it stands with the one that waits.

        Raises WaitedInVain if they cannot all come.
        """
        if self._failed:
            raise WaitedInVain(meanwhile)
        opens = self._opens
        self._here += 1
        if self._here == self._size:
            self._here = 0
            self._opens = asyncio.get_running_loop().create_future()
            opens.set_result(True)
        if not await asyncio.shield(opens):
            raise WaitedInVain(meanwhile)

    def fail(self) -> None:
        """Let nobody wait any longer, now or later."""
        self._failed = True
        if not self._opens.done():
            self._opens.set_result(False)
