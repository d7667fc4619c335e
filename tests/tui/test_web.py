"""The dashboard in a browser: who is let in, and that it answers keys."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie

import aiohttp
import pytest

from tests.support.processes import command_lines
from tests.support.served_dashboards import served
from vmckpt_lab.machine_speed import slowness

__all__ = ["served"]
FILES = 256
"""The dashboard may have open at once, in the test that is about that."""


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    jar = aiohttp.CookieJar(unsafe=True)  # it is an address, not a name
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        yield session


async def test_only_who_has_the_token_is_let_in(served: tuple[str, str]) -> None:
    url, token = served
    async with browser() as session:
        for wrong in ("/", "/?token=x", "/static/js/textual.js", "/ws"):
            async with session.get(url + wrong) as answer:
                assert answer.status == 403, wrong
        async with session.get(f"{url}/?token={token}", allow_redirects=False) as answer:
            assert answer.status == 303
            assert answer.headers["Location"] == "/"
            cookie = next(iter(SimpleCookie(answer.headers["Set-Cookie"]).values()))
            assert cookie["httponly"]
            assert cookie["samesite"] == "Strict"
        async with session.get(f"{url}/") as answer:
            assert answer.status == 200
            assert "textual.js" in await answer.text()
        async with session.get(f"{url}/?token={token}", allow_redirects=False) as answer:
            assert answer.status == 303  # also whoever has the cookie
        evil = {"Origin": "http://evil.example"}
        async with session.get(f"{url}/ws", headers=evil) as answer:
            assert answer.status == 403


async def test_no_other_page_may_show_it_and_it_loads_nothing_from_elsewhere(
    served: tuple[str, str],
) -> None:
    url, token = served
    async with browser() as session:
        async with session.get(f"{url}/?token={token}") as answer:
            assert answer.status == 200
            text = await answer.text()
            assert "textual.js" in text
            assert re.findall(r"(?:href|src)=.https?:", text.replace(url, "")) == []
            assert f"{url}/static/css/xterm.css" in text  # else the last line is below the window
        for page, status in (
            ("/", 200),
            ("/static/js/textual.js", 200),
            ("/static/css/xterm.css", 200),
            ("/nothing", 404),
        ):
            async with session.get(url + page) as answer:
                assert answer.status == status
                policy = answer.headers["Content-Security-Policy"]
                assert "frame-ancestors 'none'" in policy
                assert "default-src 'none'" in policy
                assert f"connect-src 'self' {url.replace('http', 'ws', 1)}" in policy
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert answer.headers["X-Frame-Options"] == "DENY"
    async with browser() as session, session.get(url) as answer:
        assert answer.status == 403
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


async def test_it_draws_and_answers_keys(served: tuple[str, str]) -> None:
    url, token = served
    async with browser() as session:
        async with session.get(f"{url}/?token={token}") as answer:
            assert answer.status == 200
        async with session.ws_connect(f"{url}/ws?width=100&height=30") as web:
            assert "Fleet" in await seen(web, "4 hosts")
            await web.send_json(["stdin", "2"])
            assert "from → to" in await seen(web, "from → to")
            lines = command_lines()
            begun = [line for line in lines.values() if b"dashboard\0--simulate\x004x12" in line]
            assert len(begun) > 1  # the server, and what it has started for this browser
            assert all(token.encode() not in line for line in lines.values())


async def test_a_dashboard_ends_with_a_server_that_is_killed(served: tuple[str, str]) -> None:
    url, token = served
    port = url.rpartition(":")[2].encode()
    async with browser() as session:
        async with session.get(f"{url}/?token={token}") as answer:
            assert answer.status == 200
        async with session.ws_connect(f"{url}/ws?width=100&height=30") as web:
            assert "Fleet" in await seen(web, "4 hosts")
            [server] = [pid for pid, line in command_lines().items() if b"--port\0" + port in line]
            begun = set(command_lines(server)) - {server}
            assert begun
            os.kill(server, signal.SIGKILL)
            for _ in range(600):
                if not begun & set(command_lines()):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the browser's dashboard is still running")


async def seen(web: aiohttp.ClientWebSocketResponse, wanted: str) -> str:
    """What is drawn, until that is in it."""
    text = ""
    async with asyncio.timeout(30):
        while wanted not in text:
            message = await web.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                text += message.data.decode("utf-8", "replace")
            elif message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE):
                raise AssertionError(f"it ended: {text[-2000:]}")
    return text


def idle(url: str, says: bytes) -> socket.socket:
    """A connection that never shows a token."""
    host, _, port = url.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), 5.0)
    with contextlib.suppress(OSError):  # it may be closed at once
        made.sendall(says)
    return made


@pytest.mark.parametrize("served", [few_files], indirect=True)
@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX: "], ids=["", "half"])
async def test_idle_connections_leave_room_for_a_browser_that_has_the_token(
    served: tuple[str, str], says: bytes
) -> None:
    url, token = served
    with contextlib.ExitStack() as stack:
        for _ in range(FILES + 50):
            stack.enter_context(idle(url, says))
        began = time.monotonic()
        async with browser() as session:
            async with session.get(f"{url}/?token={token}") as answer:
                assert answer.status == 200
            assert time.monotonic() - began < 3.0 * slowness()
            async with session.ws_connect(f"{url}/ws?width=100&height=30") as web:
                assert "Fleet" in await seen(web, "4 hosts")


async def test_a_connection_without_the_token_is_closed_after_a_while_and_one_with_it_stays(
    served: tuple[str, str],
) -> None:
    url, token = served
    async with browser() as session:
        async with session.get(f"{url}/?token={token}") as answer:
            assert answer.status == 200
        async with session.ws_connect(f"{url}/ws?width=100&height=30") as web:
            assert "Fleet" in await seen(web, "4 hosts")
            host, _, port = url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            began = time.monotonic()
            async with asyncio.timeout(20.0):
                assert await reader.read() == b""
            assert time.monotonic() - began > 3.0
            writer.close()
            await web.send_json(["stdin", "2"])
            assert "from → to" in await seen(web, "from → to")
