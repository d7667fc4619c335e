"""Keep an Alertmanager informed of the active alerts, with API version 2.

An Alertmanager considers an alert over unless it is sent again, so all active alerts are sent every
minute, as Prometheus does. No alert is lost if a request fails: the next request has them all.
"""

import asyncio
import base64
import json
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import aiohttp

from vmckpt.model.webhook import AlertmanagerPlace
from vmckpt.monitor import active_alerts
from vmckpt.monitor.active_alerts import EMPTY, ActiveAlert
from vmckpt.monitor.delivery import NotDelivered
from vmckpt.monitor.webhooks import post, read_private
from vmckpt.units import show_count

_AGAIN = 60.0
"""Time between two requests, in seconds, if no alert begins or ends."""
_FIRST_RETRY = 1.0
_ANSWER = aiohttp.ClientTimeout(total=10.0)


class Alertmanager:
    """Sends the active alerts to one Alertmanager, from `start` to `close`."""

    def __init__(self, place: AlertmanagerPlace, warn: Callable[[str], None]) -> None:
        """`warn` is called with problems. Raises BadInput if the password cannot be read."""
        self._place, self._warn = place, warn
        self._headers: dict[str, str] = {}
        if place.username is not None and place.password_file is not None:
            password = read_private(place.password_file, "the password of an Alertmanager")
            login = base64.b64encode(f"{place.username}:{password.strip()}".encode()).decode()
            self._headers["Authorization"] = f"Basic {login}"
        self._board = EMPTY
        self._news = asyncio.Event()
        self._failures = 0
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        return self._place.shown

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.shown)

    def show(self, active: Collection[ActiveAlert] | None) -> None:
        """Set the active alerts. Alerts that are missing since the last call have ended.

        None: another service reports the alerts; nothing more is sent.
        """
        before = self._board
        self._board = (
            EMPTY if active is None else active_alerts.board_after(before, active, time.time())
        )
        if active_alerts.is_news(before, self._board):
            self._news.set()

    async def send(self) -> None:
        """Send all alerts once. Raises NotDelivered, OSError, TimeoutError or ValueError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_ANSWER)
        now = time.time()
        body = json.dumps([one.as_json(now) for one in self._board.values()]).encode()
        url = f"{self._place.url.rstrip('/')}/api/v2/alerts"
        await post(self._session, url, body, self._headers)

    async def close(self, limit: float = 5.0) -> None:
        """Stop. Waits at most `limit` seconds until alerts that began or ended are sent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._board and (self._news.is_set() or self._failures):
            try:
                async with asyncio.timeout(limit):
                    await self.send()
            except (NotDelivered, OSError, ValueError):  # a TimeoutError is an OSError
                self._warn(f"{self.shown}: {show_count(len(self._board), 'alert')} not delivered")
        if self._session is not None:
            await self._session.close()

    async def _run(self) -> None:
        while True:
            wait = min(_FIRST_RETRY * 2 ** min(self._failures, 16), _AGAIN)
            wait = wait * random.uniform(0.5, 1.0) if self._failures else _AGAIN
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()
            self._news.clear()
            if self._board:
                await self._try()

    async def _try(self) -> None:
        try:
            await self.send()
        except (NotDelivered, OSError, ValueError) as exc:
            self._failures += 1
            if self._failures == 1:
                self._warn(f"{self.shown}: alerts could not be delivered; retrying: {exc}")
        else:
            self._failures = 0
