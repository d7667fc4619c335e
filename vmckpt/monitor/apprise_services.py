"""Send alerts to chat, mail, SMS and other services through the library Apprise.

The library is optional (`pip install vmckpt[notify]`). Its URLs contain passwords and tokens, so
they are only read from a private file, and neither the file's content nor Apprise's log, which may
quote URLs, is ever shown.
"""

import asyncio
import importlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.monitor.alerts import Page, State
from vmckpt.monitor.delivery import NotDelivered
from vmckpt.monitor.webhooks import read_private
from vmckpt.units import show_count
from vmckpt.util import thread_call

_ANSWER = 30.0
"""Time limit for a notification, in seconds. Some services need several requests for one."""
_LOGGERS = ("urllib3", "oauthlib", "requests_oauthlib")
"""Libraries of Apprise's services that log URLs and tokens at the level DEBUG."""
_TYPES = {State.FIRING: "failure", State.RESOLVED: "success", State.ONCE: "warning"}


class AppriseService:
    """A receiver of alerts: one URL of an Apprise file. See delivery.Receiver."""

    def __init__(self, service: Any, name: str) -> None:
        """`service`: an apprise.Apprise with one URL."""
        self._service, self._name = service, name
        self._call: Future[bool] | None = None

    @property
    def shown(self) -> str:
        return f"apprise {self._name}"

    async def deliver(self, page: Page) -> None:
        if self._call is not None and not self._call.done():
            raise NotDelivered("the previous attempt is still waiting for an answer")
        # Apprise waits for its services, so it is called in a thread that may be abandoned.
        self._call = thread_call.start(lambda: self._notify(page), name=self.shown)
        try:
            async with asyncio.timeout(_ANSWER):
                good = await asyncio.shield(asyncio.wrap_future(self._call))
        except TimeoutError:
            raise
        # A plugin may raise anything, and the text may contain its URL.
        except Exception as exc:  # noqa: BLE001
            raise NotDelivered(type(exc).__name__) from None
        if not good:
            raise NotDelivered("the service did not accept the alert")

    def _notify(self, page: Page) -> bool:
        state = "" if page.state is State.ONCE else f"{page.state}: "
        trouble = page.trouble
        body = trouble.text if page.state is State.RESOLVED else f"{trouble.text}\n{trouble.hint}"
        about = trouble.guest or trouble.host
        title = f"vmckpt: {state}{about}" if about else f"vmckpt: {state}{page.key}"
        return bool(
            self._service.notify(
                body=body, title=title, notify_type=_TYPES[page.state], body_format="text"
            )
        )

    async def close(self) -> None:
        """Abandon a notification that is being sent."""


def load(path: Path) -> Sequence[AppriseService]:
    """Return the services that an Apprise file defines, in Apprise's text or YAML format.

    Raises BadInput if the library is missing, or if the file is missing, invalid or not private.
    """
    try:
        apprise: Any = importlib.import_module("apprise")  # optional, and slow to import
    except ImportError:
        raise BadInput(
            f"apprise: {path} needs the Python package apprise",
            hint="install it into vmckpt's environment: pip install 'apprise>=1.9'",
        ) from None
    text = read_private(path, "Apprise URLs")
    log = logging.getLogger("apprise")
    log.disabled, log.propagate = False, False
    problems = _Counter()
    log.addHandler(problems)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        asset = apprise.AppriseAsset(app_id="vmckpt", app_desc="vmckpt", storage_mode="memory")
        config = apprise.AppriseConfig(asset=asset)
        good = config.add_config(text)
        everything = apprise.Apprise(asset=asset)
        everything.add(config)
        found = list(everything)
    finally:
        log.removeHandler(problems)
        log.disabled = True
    if not good or problems.count or not found:
        told = show_count(problems.count, "problem") if problems.count else "no URL"
        raise BadInput(
            f"{path}: {told} found by Apprise; the URLs are not shown",
            hint=f"run apprise --dry-run -vv -c {path} -b test",
        )
    return [_service(apprise.Apprise(asset=asset), one, n) for n, one in enumerate(found, start=1)]


def _service(alone: Any, one: Any, number: int) -> AppriseService:
    alone.add(one)
    return AppriseService(alone, f"{one.service_name or 'service'} ({number})")


class _Counter(logging.Handler):
    """Counts Apprise's warnings and errors, which are not shown because they quote URLs."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.WARNING
