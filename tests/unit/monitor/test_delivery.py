"""Alerts on their way to a receiver, over real HTTP."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.alert_receivers import Receiver, page, serving, until
from vmckpt.model.webhook import Webhook
from vmckpt.monitor import delivery
from vmckpt.monitor.delivery import Poster
from vmckpt.monitor.webhooks import WebhookReceiver


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    async with serving(found):
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(delivery, "wait_exponential_jitter", lambda *_: lambda __: 0.01)


@pytest.mark.parametrize("status", [500, 404, 302])
async def test_who_does_not_take_it_is_asked_again(receiver: Receiver, status: int) -> None:
    receiver.answers = [status, status]
    warned: list[str] = []
    poster = Poster(WebhookReceiver(Webhook(url=receiver.url)), warned.append)
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
    monkeypatch.setattr(delivery, "_PATIENCE", 0.1)
    warned: list[str] = []
    poster = Poster(WebhookReceiver(Webhook(url="http://x..y/z")), warned.append)
    poster.start()
    for number in range(2):
        poster.post(page(f"page {number}"))
    await until(lambda: any("not delivered: page 1" in one for one in warned))
    await poster.close()


async def test_who_never_answers_is_given_up_and_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_PATIENCE", 0.1)
    warned: list[str] = []
    # No program listens on port 1 of this machine.
    poster = Poster(WebhookReceiver(Webhook(url="http://127.0.0.1:1/token-in-it")), warned.append)
    poster.start()
    poster.post(page("not received"))
    await until(lambda: any("not delivered: not received" in one for one in warned))
    await poster.close()
    assert not any("token-in-it" in one for one in warned)


async def test_an_end_does_not_wait_for_who_is_silent() -> None:
    warned: list[str] = []
    poster = Poster(WebhookReceiver(Webhook(url="http://127.0.0.1:1/")), warned.append)
    poster.start()
    poster.post(page("late"))
    await poster.close(limit=0.1)
    assert warned[-1] == "webhook 127.0.0.1: 1 alert not delivered"


async def test_what_nobody_takes_for_long_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MOST", 2)
    warned: list[str] = []
    poster = Poster(WebhookReceiver(Webhook(url="http://127.0.0.1:1/")), warned.append)
    for text in ("one", "two", "three"):
        poster.post(page(text))
    assert warned == ["webhook 127.0.0.1: too many unsent alerts; dropped: one"]
