"""Services to which alerts are sent, over real HTTP, and alerts to send."""

import asyncio
import base64
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from aiohttp import web

from vmckpt.monitor.alerts import Page, State
from vmckpt.monitor.health import Trouble


class Receiver:
    """A web server that takes alerts, or does not."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, web.Request]] = []
        """The body, and the request with its headers."""
        self.bodies: list[bytes] = []
        self.answers: list[int] = []
        """What it says to the next requests; then 204."""
        self.asked = 0
        self.port = 0
        self.silent = False

    async def take(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.read()
        while self.silent:  # noqa: ASYNC110 – set by tests
            await asyncio.sleep(0.01)
        status = self.answers.pop(0) if self.answers else 204
        if status == 204:
            self.bodies.append(body)
            self.taken.append((json.loads(body), request))
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    def at(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def url(self) -> str:
        return self.at("/vmckpt")


@asynccontextmanager
async def serving(found: Receiver) -> AsyncIterator[None]:
    served = web.Application()
    served.router.add_post("/{path:.*}", found.take)
    runner = web.AppRunner(served, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.port = runner.addresses[0][1]
    try:
        yield
    finally:
        found.silent = False
        await runner.cleanup()


_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ALERT = {"labels", "annotations", "startsAt", "endsAt", "generatorURL"}


class AlertmanagerServer(Receiver):
    """Takes what API v2 of Alertmanager takes (postableAlerts in its openapi.yaml, and the checks
    of its alerts): all alerts of a request or none. It knows which alerts are active."""

    def __init__(self) -> None:
        super().__init__()
        self.alerts: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}
        self.login: bytes | None = None
        """User and password."""

    async def take(self, request: web.Request) -> web.Response:
        scheme, _, login = request.headers.get("Authorization", "").partition(" ")
        if self.login and (scheme, base64.b64decode(login)) != ("Basic", self.login):
            self.asked += 1
            return web.Response(status=401)
        answer = await super().take(request)
        if answer.status != 204:
            return answer
        if request.path != "/api/v2/alerts" or request.content_type != "application/json":
            return web.Response(status=404)
        for one in self.taken[-1][0]:
            if not self._good(one):
                return web.Response(status=400)
        for one in self.taken[-1][0]:
            self.alerts[frozenset(one["labels"].items())] = one
        return web.Response(status=200)

    @staticmethod
    def _good(one: dict[str, Any]) -> bool:
        sets = (one["labels"], one.get("annotations", {}))
        begins, ends = (datetime.fromisoformat(one[name]) for name in ("startsAt", "endsAt"))
        return (
            set(one) <= _ALERT
            and bool(one["labels"].get("alertname"))
            and all(_LABEL.fullmatch(name) for names in sets for name in names)
            and all(isinstance(value, str) and value for names in sets for value in names.values())
            and begins.tzinfo is not None
            and begins <= ends
        )

    @property
    def active(self) -> list[str]:
        """The keys of the alerts that are active now."""
        return sorted(
            one["labels"]["key"] for one in self.alerts.values()
            if datetime.fromisoformat(one["endsAt"]).timestamp() > time.time()
        )  # fmt: skip


def page(
    text: str, state: State = State.ONCE, key: str = "ended m-1", guest: str | None = None
) -> Page:
    trouble = Trouble(text=text, hint="look", guest=guest)
    return Page(key=key, state=state, at=1.0, trouble=trouble)


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not there():  # noqa: ASYNC110 – what is waited for has no event
            await asyncio.sleep(0.01)
