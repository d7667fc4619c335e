"""The dashboard in a browser: textual-serve, protected by a token."""

import asyncio
import ctypes
import hmac
import logging
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler
from textual_serve.server import Server
from yarl import URL

from vmckpt.app.subprocesses import PROGRAM
from vmckpt.errors import BadInput

_COOKIE = "vmckpt-token"
"""Prefix of the cookie's name. The port follows, as cookies apply to all ports of a host."""


# textual-serve's page has inline scripts and styles, and xterm.js sets styles.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
_HEADERS = {
    "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Cache-Control": "no-store",
}  # fmt: skip
_MOST, _PATIENCE = 64, 5.0
"""Maximum number of connections without the token, and their maximum age in seconds."""
_BACKLOG = 100
"""Maximum number of pending connections, which asyncio accepts in one step."""
_SHUTDOWN = 1.0
_PR_SET_PDEATHSIG = 1
"""An option of prctl(2): the signal that this process gets when its parent dies."""
_LINK = r"<link[^>]*\bhref=[\"'](?!{own}/)https?://[^>]*>"
"""The elements of the page that load a font from a site other than `own`."""


class TokenRequired(Server):
    """A server that requires a token: first in the URL, afterwards in a cookie.

    A browser with the token has all the rights of the user that started the server.
    """

    def __init__(
        self, command: str, host: str, port: int, url: str, say: Callable[[str], None]
    ) -> None:
        super().__init__(command, host=host, port=port, title="vmckpt", public_url=url)
        self.token = secrets.token_urlsafe(24)
        self._say = say
        # Browsers send the origin in lower case and omit a default port.
        self._origin = str(URL(url).origin())
        self._elsewhere = re.compile(_LINK.format(own=re.escape(self.public_url.rstrip("/"))))
        self._strangers: dict[web.RequestHandler, None] = {}
        """Connections that have not presented the token, oldest first."""

    def serve(self, debug: bool = False) -> None:
        """Serve until SIGINT or SIGTERM. Raises OSError."""
        self.debug = debug
        self.initialize_logging()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
        runner = web.AppRunner(await self._make_app(), shutdown_timeout=_SHUTDOWN)
        await runner.setup()
        try:
            made = runner.server
            assert made is not None
            listening = await loop.create_server(
                lambda: self._meet(made()), self.host, self.port, backlog=_BACKLOG
            )
            self._say(f"{self.public_url}/?token={self.token}")
            await over.wait()
            listening.close()
        finally:
            await runner.cleanup()

    def _meet(self, connection: web.RequestHandler) -> web.RequestHandler:
        """Limit the number of connections without the token, and their age.

        Otherwise idle connections could use up the file descriptors, and a browser with the token
        could not connect. Such a browser presents the token at once, so the oldest connection is
        closed first.
        """
        self._strangers[connection] = None
        asyncio.get_running_loop().call_later(_PATIENCE, self._dismiss, connection)
        # A connection that is still being accepted has no transport and cannot be closed yet.
        older = [one for one in self._strangers if one.transport is not None]
        for one in older[: max(0, len(self._strangers) - _MOST)]:
            self._dismiss(one)
        return connection

    def _dismiss(self, connection: web.RequestHandler) -> None:
        if connection in self._strangers:
            del self._strangers[connection]
            connection.force_close()

    def initialize_logging(self) -> None:
        """Log only errors, to stderr."""
        logging.getLogger("textual-serve").setLevel(logging.ERROR)

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing: `serve` prints the URL once it listens."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._checked)
        app.on_response_prepare.append(self._harden)
        return app

    async def _harden(self, _: web.Request, response: web.StreamResponse) -> None:
        """Forbid embedding the page in other pages, and loading content from other sites."""
        socket = self._origin.replace("http", "ws", 1)
        response.headers.update(_HEADERS)
        response.headers["Content-Security-Policy"] = f"{_POLICY}; connect-src 'self' {socket}"

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the token, and cross-site requests even with the token."""
        origin = request.headers.get("Origin")
        if origin is not None and origin != self._origin:
            raise web.HTTPForbidden(text=f"cross-site request refused; open {self.public_url}")
        cookie = f"{_COOKIE}-{self.port}"
        if self._fits(request.query.get("token", "")):
            # The token leaves the URL at once: histories and logs record URLs.
            answer = web.HTTPSeeOther("/")
            secure = self._origin.startswith("https:")
            answer.set_cookie(cookie, self.token, httponly=True, samesite="Strict", secure=secure)
            raise answer
        if self._fits(request.cookies.get(cookie, "")):
            self._strangers.pop(request.protocol, None)
            page = await handler(request)
            if isinstance(page, web.Response) and page.text and request.path == "/":
                page.text = self._elsewhere.sub("", page.text)
            return page
        raise web.HTTPForbidden(text="open the URL that vmckpt dashboard --serve has printed")

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def end_with_server() -> None:
    """Have the kernel end this process, the dashboard of one browser, when the server ends.

    With SIGTERM, Textual would first wait for its output to be read.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the server has ended already
        sys.exit(1)


def serve(
    words: Sequence[str], *, host: str, port: int, url: str | None, say: Callable[[str], None]
) -> None:
    """Serve the dashboard to browsers until Ctrl-C. `words`: the command to run for each browser.

    `url`: the URL that browsers use; None: it is made from `host` and `port`. `say` is called with
    the URL, including the token. Raises BadInput if browsers cannot open `url` or `host`, and
    OSError if the port is in use.
    """
    if url is not None and not re.fullmatch(r"https?://[^/\s]+/?", url):
        raise BadInput(
            f"{url!r} must be an http or https URL without a path",
            hint="use a value like --url https://ops.example",
        )
    if url is None and host in ("0.0.0.0", "::"):
        raise BadInput(
            f"browsers cannot open {host}",
            hint="add --url with the URL for browsers, like http://ops1:8010",
        )
    command = f"exec {shlex.join([*PROGRAM, *words])}"  # the shell must not stand between
    place = f"[{host}]" if ":" in host else host
    server = TokenRequired(command, host, port, (url or f"http://{place}:{port}").rstrip("/"), say)
    server.serve()
    sys.stdout.flush()
