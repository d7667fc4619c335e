"""What is printed of replaced network cards, and when the command fails."""

from dataclasses import replace

import pytest

from tests.support.card_reports import CARD, DONE, LOST, found
from vmckpt.capture.network_cards import CardReport, CardState
from vmckpt.cli import cards


@pytest.mark.parametrize(
    ("card", "told"),
    [
        (
            CARD,
            "net0 uses vhost; it would be unplugged and plugged in again, usually with about 1 s"
            " without network; the guest agent must then report 10.0.0.5 again",
        ),
        (
            DONE,
            "replaced, because net0 uses vhost; without network for 750 ms; the guest agent reports"
            " 10.0.0.5 again",
        ),
        (
            LOST,
            "replaced, because net0 uses vhost; without network for 60.0 s; the guest agent does"
            " not report 10.0.0.5",
        ),
        (
            replace(DONE, agent=False, addresses=()),
            "replaced, because net0 uses vhost; without network for 750 ms; no guest agent answers,"
            " so check the guest's network yourself",
        ),
        (
            replace(DONE, addresses=(), sharers=("eth0", "bond0")),
            "replaced, because net0 uses vhost; without network for 750 ms; the guest agent reports"
            " no address of the card; check in the guest that eth0, bond0 use the new card",
        ),
    ],
)
def test_a_card_is_told_of_in_a_line(card: CardReport, told: str) -> None:
    assert list(cards.in_words(found(card))) == [f"net0 (52:54:00:00:00:01): {told}"]


def test_what_else_is_told() -> None:
    assert list(cards.in_words(replace(found(), live=None))) == []
    assert list(cards.in_words(found())) == ["no network card of web1 needs to be replaced"]
    (first, *_) = cards.in_words(found(state=CardState.ABSENT))
    assert "would be plugged in again" in first
    (first, *_) = cards.in_words(found(CARD, refused="the guest is paused"))
    assert first == "the network cards cannot be replaced: the guest is paused"


def test_a_command_fails_if_an_address_did_not_return() -> None:
    for fine in (found(DONE), found(CARD), found(), replace(found(), live=None)):
        assert cards.trouble(fine) is None
    told = cards.trouble(found(LOST, replace(CARD, card="net1")))
    assert told is not None
    assert told.message == (
        "web1 on alpha: net0 was replaced, but the guest agent does not report 10.0.0.5 within"
        " 60.0 s; net1 not replaced"
    )
    assert "virsh console web1" in str(told.hint)
