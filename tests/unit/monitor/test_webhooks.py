"""Pages on their way to a webhook, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from vmckpt.errors import BadInput
from vmckpt.model.webhook import Webhook
from vmckpt.monitor import webhooks
from vmckpt.monitor.alerts import Page, State
from vmckpt.monitor.health import Trouble
from vmckpt.monitor.webhooks import SIGNATURE, Poster, signature


class Receiver:
    """A web server that takes pages, or does not."""

    def __init__(self) -> None:
        self.taken: list[tuple[dict[str, Any], str | None]] = []
        self.answers: list[int] = []
        """What it says to the next ones; then 204."""
        self.asked = 0
        self.port = 0

    async def take(self, request: web.Request) -> web.Response:
        self.asked += 1
        status = self.answers.pop(0) if self.answers else 204
        body = await request.read()
        if status == 204:
            self.taken.append((json.loads(body), request.headers.get(SIGNATURE)))
            if request.headers.get(SIGNATURE) is not None:
                assert request.headers[SIGNATURE] == signature(b"s3cret", body)
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/vmckpt"


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    served = web.Application()
    served.router.add_post("/vmckpt", found.take)
    runner = web.AppRunner(served)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.port = runner.addresses[0][1]
    yield found
    await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(webhooks, "wait_exponential_jitter", lambda *_: lambda __: 0.01)


def page(text: str) -> Page:
    return Page(key="k", state=State.ONCE, at=1.0, trouble=Trouble(text=text, hint="look"))


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not there():  # noqa: ASYNC110 – what is waited for has no event
            await asyncio.sleep(0.01)


async def test_pages_arrive_signed_and_in_their_order(receiver: Receiver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    warned: list[str] = []
    poster = Poster(Webhook(url=receiver.url, secret_file=secret), warned.append)
    poster.start()
    for number in range(5):
        poster.post(page(f"page {number}"))
    await poster.close()

    assert [body["text"] for body, _ in receiver.taken] == [f"page {n}" for n in range(5)]
    assert all(sign is not None and sign.startswith("sha256=") for _, sign in receiver.taken)
    assert warned == []


@pytest.mark.parametrize("status", [500, 404, 302])
async def test_who_does_not_take_it_is_asked_again(receiver: Receiver, status: int) -> None:
    receiver.answers = [status, status]
    warned: list[str] = []
    poster = Poster(Webhook(url=receiver.url), warned.append)
    poster.start()
    poster.post(page("first"))
    poster.post(page("second"))
    await until(lambda: len(receiver.taken) == 2)
    await poster.close()

    assert [body["text"] for body, _ in receiver.taken] == ["first", "second"]
    assert receiver.asked == 4
    assert warned == ["webhook 127.0.0.1: an alert could not be delivered; retrying"]


async def test_a_name_that_is_none_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "_PATIENCE", 0.1)
    warned: list[str] = []
    poster = Poster(Webhook(url="http://x..y/z"), warned.append)
    poster.start()
    for number in range(2):
        poster.post(page(f"page {number}"))
    await until(lambda: any("not delivered: page 1" in one for one in warned))
    await poster.close()


async def test_who_never_answers_is_given_up_and_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "_PATIENCE", 0.1)
    warned: list[str] = []
    # Nobody listens on port 1 of this machine.
    poster = Poster(Webhook(url="http://127.0.0.1:1/token-in-it"), warned.append)
    poster.start()
    poster.post(page("nobody hears it"))
    await until(lambda: any("not delivered: nobody hears it" in one for one in warned))
    await poster.close()
    assert not any("token-in-it" in one for one in warned)


async def test_an_end_does_not_wait_for_who_is_silent() -> None:
    warned: list[str] = []
    poster = Poster(Webhook(url="http://127.0.0.1:1/"), warned.append)
    poster.start()
    poster.post(page("late"))
    await poster.close(limit=0.1)
    assert warned[-1] == "webhook 127.0.0.1: 1 alert not delivered"


async def test_what_nobody_takes_for_long_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "MOST", 2)
    warned: list[str] = []
    poster = Poster(Webhook(url="http://127.0.0.1:1/"), warned.append)
    for text in ("one", "two", "three"):
        poster.post(page(text))
    assert warned == ["webhook 127.0.0.1: queue full, dropped: one"]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read a webhook's secret"), ("\n", "is empty")]
)
def test_a_secret_that_is_none_is_said(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadInput, match=said):
        Poster(Webhook(url="http://127.0.0.1:1/", secret_file=file), print)
