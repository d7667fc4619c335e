"""Post alerts to webhooks: signed, in order, and retried for an hour until accepted."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from pathlib import Path

import aiohttp
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from vmckpt.errors import BadInput
from vmckpt.model.webhook import Webhook
from vmckpt.monitor.alerts import Page
from vmckpt.units import show_count

log = logging.getLogger(__name__)

SIGNATURE = "X-Vmckpt-Signature"
_PATIENCE = 3600.0
_LONGEST_WAIT = 60.0
_ANSWER = aiohttp.ClientTimeout(total=10.0)
MOST = 1000
"""Maximum number of queued alerts; beyond it, the oldest alerts are dropped."""


class _Refused(Exception):
    """The receiver answered with a status other than 2xx."""


class Poster:
    """Posts alerts to one webhook, from `start` to `close`."""

    def __init__(self, hook: Webhook, warn: Callable[[str], None]) -> None:
        """`warn` is called with problems. Raises BadInput if the secret cannot be read."""
        self._hook, self._warn = hook, warn
        self._secret = _secret(hook.secret_file)
        self._waiting: asyncio.Queue[Page] = asyncio.Queue(MOST)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"webhook {self._hook.url}")

    def post(self, page: Page) -> None:
        """Queue an alert without waiting. If the queue is full, the oldest alert is dropped."""
        while self._waiting.full():
            lost = self._waiting.get_nowait()
            self._warn(f"webhook {self._hook.shown}: queue full, dropped: {lost.trouble.text}")
        self._waiting.put_nowait(page)

    async def close(self, limit: float = 5.0) -> None:
        """Stop. Waits at most `limit` seconds until the queued alerts are delivered."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(limit):
                await self._waiting.join()
        except TimeoutError:
            self._warn(
                f"webhook {self._hook.shown}:"
                f" {show_count(self._waiting.qsize() + 1, 'alert')} not delivered"
            )
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=_ANSWER) as session:
            while True:
                page = await self._waiting.get()
                try:
                    await self._deliver(session, page)
                finally:
                    self._waiting.task_done()

    async def _deliver(self, session: aiohttp.ClientSession, page: Page) -> None:
        body = json.dumps(page.as_json()).encode()
        trying = AsyncRetrying(
            # An invalid host name raises ValueError, and the network may raise any OSError.
            retry=retry_if_exception_type(
                (aiohttp.ClientError, TimeoutError, _Refused, OSError, ValueError)
            ),
            wait=wait_exponential_jitter(1.0, _LONGEST_WAIT),
            stop=stop_after_delay(_PATIENCE),
        )
        said = False
        try:
            async for attempt in trying:
                with attempt:
                    if attempt.retry_state.attempt_number > 1 and not said:
                        said = True
                        self._warn(
                            f"webhook {self._hook.shown}: an alert could not be delivered; retrying"
                        )
                    await self._post(session, body)
        except RetryError as exc:
            why = exc.last_attempt.exception()
            self._warn(f"webhook {self._hook.shown}: not delivered: {page.trouble.text}: {why}")

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if self._secret is not None:
            headers[SIGNATURE] = signature(self._secret, body)
        async with session.post(
            self._hook.url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            if not 200 <= answer.status < 300:
                raise _Refused(f"HTTP status {answer.status}")


def signature(secret: bytes, body: bytes) -> str:
    """Return the HMAC-SHA256 of the body, as "sha256=" and hex digits."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        found = file.read_bytes().strip()
    except OSError as exc:
        raise BadInput(
            f"cannot read a webhook's secret: {file}: {exc.strerror}",
            hint="write a line of random text to that file, readable only by the service",
        ) from None
    if not found:
        raise BadInput(f"{file}: the webhook's secret is empty")
    return found
