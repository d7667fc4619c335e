"""Describe the network cards that `vmckpt prepare --live` replaces."""

from collections.abc import Iterator

from vmckpt.capture.network_cards import CardReport, CardState
from vmckpt.errors import HypervisorError
from vmckpt.snapshot.prepare import Readiness
from vmckpt.units import show_seconds


def in_words(found: Readiness) -> Iterator[str]:
    """Yield lines about the cards that were replaced or would be; nothing without --live."""
    if found.live is None:
        return
    if found.live.state is CardState.ABSENT:
        yield "a network card that an interrupted command unplugged would be plugged in again"
    if found.live.refused is not None and found.live.cards:
        yield f"the network cards cannot be replaced: {found.live.refused}"
    if not found.live.cards:
        yield f"no network card of {found.guest} needs to be replaced"
    for card in found.live.cards:
        yield f"{card.card} ({card.mac}): {_card(card)}"


def _card(card: CardReport) -> str:
    if not card.replaced or card.gone is None:
        return (
            f"{card.why}; it would be unplugged and plugged in again, usually with about 1 s"
            f" without network; {_expected(card)}"
        )
    told = f"replaced, because {card.why}; without network for {show_seconds(card.gone)}"
    if card.confirmed:
        told += f"; the guest agent reports {', '.join(card.addresses)} again"
    elif card.missing:
        told += f"; the guest agent does not report {', '.join(card.missing)}"
    else:
        told += f"; {_expected(card)}"
    if card.sharers:
        told += f"; check in the guest that {', '.join(card.sharers)} use the new card"
    return told


def _expected(card: CardReport) -> str:
    """Return how the addresses of a card are confirmed."""
    if card.addresses:
        return f"the guest agent must then report {', '.join(card.addresses)} again"
    if card.agent:
        return "the guest agent reports no address of the card"
    return "no guest agent answers, so check the guest's network yourself"


def trouble(found: Readiness) -> HypervisorError | None:
    """Return the error for the first replaced card that lacks addresses; None if there is none."""
    cards = () if found.live is None else found.live.cards
    for card in cards:
        if card.confirmed is False:
            rest = [one.card for one in cards if not one.replaced]
            return HypervisorError(
                f"{found.guest} on {found.host}: {card.card} was replaced, but the guest agent does"
                f" not report {', '.join(card.missing)} within {show_seconds(card.gone or 0.0)}"
                + (f"; {', '.join(rest)} not replaced" if rest else ""),
                host=found.host,
                hint="renew the DHCP lease or configure the interface again in the guest, for"
                f" example through virsh console {found.guest}",
            )
    return None
