"""Deliver alerts to receivers: in order, without blocking, and retried for an hour."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from vmckpt.monitor.alerts import Page
from vmckpt.units import show_count

_PATIENCE = 3600.0
_LONGEST_WAIT = 60.0
MOST = 1000
"""Maximum number of queued alerts; beyond it, the oldest alerts are dropped."""


class NotDelivered(Exception):
    """The receiver did not accept an alert."""


class Receiver(Protocol):
    """A service to which alerts are sent one by one."""

    @property
    def shown(self) -> str:
        """The kind and name of the receiver, for messages, without any secret."""

    async def deliver(self, page: Page) -> None:
        """Send an alert once, within a time limit.

        Raises NotDelivered, OSError, TimeoutError, or ValueError for an invalid address.
        """

    async def close(self) -> None:
        """Close connections."""


class Poster:
    """Sends alerts to one receiver, from `start` to `close`."""

    def __init__(self, receiver: Receiver, warn: Callable[[str], None]) -> None:
        """`warn` is called with problems."""
        self._receiver, self._warn = receiver, warn
        self._waiting: asyncio.Queue[Page] = asyncio.Queue(MOST)
        self._task: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        return self._receiver.shown

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.shown)

    def post(self, page: Page) -> None:
        """Queue an alert without waiting. If the queue is full, the oldest alert is dropped."""
        while self._waiting.full():
            lost = self._waiting.get_nowait()
            self._warn(f"{self.shown}: too many unsent alerts; dropped: {lost.trouble.text}")
        self._waiting.put_nowait(page)

    async def close(self, limit: float = 5.0) -> None:
        """Stop. Waits at most `limit` seconds until the queued alerts are delivered."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(limit):
                await self._waiting.join()
        except TimeoutError:
            count = show_count(self._waiting.qsize() + 1, "alert")
            self._warn(f"{self.shown}: {count} not delivered")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._receiver.close()

    async def _run(self) -> None:
        while True:
            page = await self._waiting.get()
            try:
                await self._deliver(page)
            finally:
                self._waiting.task_done()

    async def _deliver(self, page: Page) -> None:
        trying = AsyncRetrying(
            retry=retry_if_exception_type((NotDelivered, TimeoutError, OSError, ValueError)),
            wait=wait_exponential_jitter(1.0, _LONGEST_WAIT),
            stop=stop_after_delay(_PATIENCE),
        )
        said = False
        try:
            async for attempt in trying:
                with attempt:
                    if attempt.retry_state.attempt_number > 1 and not said:
                        said = True
                        self._warn(f"{self.shown}: an alert could not be delivered; retrying")
                    await self._receiver.deliver(page)
        except RetryError as exc:
            why = exc.last_attempt.exception()
            self._warn(f"{self.shown}: an alert was not delivered: {page.trouble.text}: {why}")
