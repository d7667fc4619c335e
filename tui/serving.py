"""The dashboard in a browser: textual-serve behind a token."""

import hmac
import logging
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler
from textual_serve.server import Server

from vmckpt.api.launching import PROGRAM

_COOKIE = "vmckpt-token"


class Guarded(Server):
    """Lets in who has the token: first in the address, from then on in a cookie.

    Whoever may open it may do all that whoever began it may do.
    """

    def __init__(
        self, command: str, host: str, port: int, url: str, say: Callable[[str], None]
    ) -> None:
        super().__init__(command, host=host, port=port, title="vmckpt", public_url=url)
        self.token = secrets.token_urlsafe(24)
        self._say = say

    def initialize_logging(self) -> None:
        """What it logs goes to stderr as everything else does, and only if it is bad."""
        logging.getLogger("textual-serve").setLevel(logging.ERROR)

    async def on_startup(self, app: web.Application) -> None:
        """Tell where it is."""
        self._say(f"{self.public_url}/?token={self.token}")

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._checked)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who has no token, and pages of others that use a browser which has it."""
        origin = request.headers.get("Origin")
        if origin is not None and origin.rstrip("/") != self.public_url:
            raise web.HTTPForbidden(text="this page may not be used from another one")
        if self._fits(request.cookies.get(_COOKIE, "")):
            return await handler(request)
        if not self._fits(request.query.get("token", "")):
            raise web.HTTPForbidden(text="the address that vmckpt dashboard --serve has printed")
        # Out of the address at once: addresses are written down in many places.
        answer = web.HTTPSeeOther("/")
        answer.set_cookie(_COOKIE, self.token, httponly=True, samesite="Strict")
        raise answer

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def serve(
    words: Sequence[str], *, host: str, port: int, url: str | None, say: Callable[[str], None]
) -> None:
    """Until Ctrl-C. `words`: the command for each browser. Raises OSError: the port is taken."""
    command = shlex.join([*PROGRAM, *words])
    place = f"[{host}]" if ":" in host else host
    server = Guarded(command, host, port, (url or f"http://{place}:{port}").rstrip("/"), say)
    server.serve()
    sys.stdout.flush()
