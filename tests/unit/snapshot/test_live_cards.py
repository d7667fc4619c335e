"""Cards of a running guest: what the agent is ordered, what is read of its answers, recovery."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.builders import HOST
from vmckpt.agent import client
from vmckpt.capture.network_cards import CardReport, CardState
from vmckpt.errors import RemoteError
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.snapshot import live_cards
from vmckpt.snapshot.live_cards import LiveCards
from vmckpt.units import Seconds

CARD = CardReport(card="net0", mac="52:54:00:00:00:01", why="net0 uses vhost")
DONE = replace(CARD, replaced=True, gone=Seconds(0.5))


@pytest.fixture
def caller() -> Caller:
    return Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())


def answers(monkeypatch: pytest.MonkeyPatch, told: object) -> list[Mapping[str, Any]]:
    orders: list[Mapping[str, Any]] = []

    async def run_order(_: Host, order: Mapping[str, Any], *__: object) -> dict[str, Any]:
        orders.append(order)
        return cast("dict[str, Any]", told)

    monkeypatch.setattr(client, "run_order", run_order)
    return orders


async def test_each_order_is_read(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    told = {"cards": [CARD.to_json()], "refused": "x", "state": "absent"}
    orders = answers(monkeypatch, told)
    found = await live_cards.look(HOST, "u-1", caller)
    assert found == LiveCards(cards=(CARD,), refused="x", state=CardState.ABSENT)
    assert (await live_cards.replace(HOST, "u-1", caller)).cards == (CARD,)
    assert await live_cards.finish(HOST, "u-1", caller, dry=True) is CardState.ABSENT
    assert [(one["what"], one["dry"]) for one in orders] == [
        ("look", False), ("replace", False), ("finish", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        {}, {"cards": None, "refused": None, "state": "new"},
        {"cards": [{}], "refused": None, "state": "new"},
        {"cards": [], "refused": None, "state": "odd"},
        {"cards": [CARD.to_json()] * 101, "refused": None, "state": "new"},
    ],
)  # fmt: skip
async def test_an_invalid_answer_is_refused(
    monkeypatch: pytest.MonkeyPatch, caller: Caller, told: object
) -> None:
    answers(monkeypatch, told)
    with pytest.raises(RemoteError, match="invalid message"):
        await live_cards.look(HOST, "u-1", caller)


@pytest.mark.parametrize(
    ("cards", "state", "to_do"),
    [
        ((), CardState.NOTHING, False), ((CARD,), CardState.NOTHING, True),
        ((DONE,), CardState.NOTHING, False), ((DONE, CARD), CardState.NOTHING, True),
        ((), CardState.ABSENT, True), ((), CardState.NEW, False),
    ],
)  # fmt: skip
def test_there_is_something_to_do_while_a_card_needs_it(
    cards: tuple[CardReport, ...], state: CardState, to_do: bool
) -> None:
    assert LiveCards(cards=cards, state=state).to_do is to_do


@pytest.mark.parametrize(
    ("state", "lacks", "outcome", "truth"),
    [
        (CardState.NOTHING, False, Outcome.COMPLETED, "all network cards of web1 are plugged in"),
        (CardState.NOTHING, True, Outcome.FAILED, "all network cards of web1 are plugged in"),
        (CardState.NEW, False, Outcome.COMPLETED, "all network cards of web1 are plugged in"),
        (CardState.ABSENT, False, Outcome.COMPLETED, "a network card of web1 was unplugged"),
        (CardState.LEFT, True, Outcome.FAILED, "web1 was stopped"),
        (CardState.OLD, True, None, "may have been asked to release it"),
    ],
)
def test_an_orphaned_replacement_is_settled_by_the_state_of_the_card(
    state: CardState, lacks: bool, outcome: Outcome | None, truth: str
) -> None:
    told = live_cards.verdict(state, "web1", lacks=lacks)
    assert told.outcome is outcome
    assert truth in told.truth
    assert bool(told.settle) == (outcome is None)
    assert bool(told.did) == (state is CardState.ABSENT)
