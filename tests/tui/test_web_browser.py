"""The dashboard in a real browser: it is drawn, and it answers keys.

With VMCKPT_PICTURES=FOLDER what is seen is kept there.
"""

import asyncio
import base64
import itertools
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.served_dashboards import served

__all__ = ["served"]
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--window-size=1200,720", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """One page, by the browser's own protocol."""

    def __init__(self, web: aiohttp.ClientWebSocketResponse) -> None:
        self._web, self._ids = web, itertools.count(1)

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command, and its answer."""
        id_ = next(self._ids)
        await self._web.send_json({"id": id_, "method": method, "params": parameters})
        while True:
            told = await self._web.receive_json(timeout=30)
            if told.get("id") == id_:
                assert "error" not in told, told
                return dict(told["result"])

    async def value(self, script: str) -> Any:
        told = await self.do("Runtime.evaluate", expression=script, returnByValue=True)
        return told["result"].get("value")

    async def key(self, text: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.do("Input.dispatchKeyEvent", type=kind, text=text, key=text)

    async def click(self) -> None:
        """Into the terminal, which gets the keys from then on."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.do(
                "Input.dispatchMouseEvent", type=kind, x=600, y=550, button="left", clickCount=1
            )

    async def picture(self, name: str) -> bytes:
        """What is seen of the lines that a few guests leave empty."""
        if folder := os.environ.get("VMCKPT_PICTURES"):
            whole = await self.do("Page.captureScreenshot", format="png")
            (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(whole["data"]))
        area = {"x": 0, "y": 490, "width": 1100, "height": 80, "scale": 1}
        told = await self.do("Page.captureScreenshot", format="png", clip=area)
        return base64.b64decode(told["data"])


@asynccontextmanager
async def chromium(folder: Path, url: str) -> AsyncIterator[Page]:
    """A browser with that page; gone afterwards."""
    words = ["chromium", *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    log = folder / "chromium.log"
    with log.open("w") as out:
        process = subprocess.Popen(  # noqa: ASYNC220  # it is begun in a moment
            words, stdout=out, stderr=out, start_new_session=True
        )
    try:
        async with asyncio.timeout(60):
            while (found := re.search(r"ws://([\d.:]+)/", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://{found[1]}/json/new?{url}") as answer:
                where = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(where, max_msg_size=1 << 26) as web:
                yield Page(web)
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)


@pytest.mark.long
async def test_a_browser_shows_it_and_answers_keys(served: tuple[str, str], tmp_path: Path) -> None:
    url, token = served
    async with chromium(tmp_path, f"{url}/?token={token}") as page:
        for _ in range(300):
            if await page.value("document.body.classList.contains('-first-byte')"):
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(3.0)  # until it has faded in
        # The token does not stay in the address, and no script can read it.
        assert await page.value("location.href") == f"{url}/"
        assert await page.value("document.cookie") == ""
        empty = await page.picture("browser")
        assert await page.picture("browser") == empty  # there are but a few guests
        await page.click()
        await page.key("2")
        for _ in range(100):
            if await page.picture("browser-jobs") != empty:
                return
            await asyncio.sleep(0.2)
        raise AssertionError("the list of jobs never came")
