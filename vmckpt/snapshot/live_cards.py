"""Replace network cards of a running guest: the controller's part."""

from dataclasses import dataclass

from vmckpt.agent import client
from vmckpt.agent.orders import CardsOrder
from vmckpt.capture.network_cards import CardReport, CardState
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled

_MOST = 100
"""Maximum number of cards accepted from an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCards:
    """The network cards of a running guest that must be replaced, or were replaced."""

    cards: tuple[CardReport, ...]
    refused: str | None = None
    """Why the cards cannot be replaced; None if no reason is known."""
    state: CardState = CardState.NOTHING
    """The state of a card whose replacement was interrupted."""

    @property
    def to_do(self) -> bool:
        """Whether a replacement would change anything."""
        return self.state is CardState.ABSENT or any(not card.replaced for card in self.cards)


async def look(host: Host, guest: str, caller: Caller) -> LiveCards:
    """Return the cards of a guest (a UUID) whose output cannot be buffered. Changes nothing.

    Raises HypervisorError, RemoteError.
    """
    order = CardsOrder(what="look", guest=guest, uri=client.LIBVIRT, host=host.name)
    told = await client.run_order(host, order.as_json(), caller.emit, caller.stop)
    with client.sensible(host):
        refused = told["refused"]
        return LiveCards(
            cards=_reports(told["cards"]), state=CardState(told["state"]),
            refused=None if refused is None else str(refused),
        )  # fmt: skip


async def replace(host: Host, guest: str, caller: Caller) -> LiveCards:
    """Replace the cards of a guest (a UUID) whose output cannot be buffered.

    If a card is unplugged or may still be released, the error's `undone` is false.

    Raises BadInput, GuestLocked, HypervisorError, RemoteError.
    """
    order = CardsOrder(what="replace", guest=guest, uri=client.LIBVIRT, host=host.name)
    told = await client.run_order(host, order.as_json(), caller.emit, caller.stop)
    with client.sensible(host):
        return LiveCards(cards=_reports(told["cards"]))


async def finish(host: Host, guest: str, caller: Caller, *, dry: bool) -> CardState:
    """Finish an interrupted replacement. Returns the state in which the card was found.

    `dry`: only inspect. Raises GuestLocked, HypervisorError, RemoteError.
    """
    order = CardsOrder(what="finish", guest=guest, uri=client.LIBVIRT, host=host.name, dry=dry)
    told = await client.run_order(host, order.as_json(), caller.emit, caller.stop)
    with client.sensible(host):
        return CardState(told["state"])


def _reports(told: object) -> tuple[CardReport, ...]:
    if not isinstance(told, list) or len(told) > _MOST:
        raise TypeError("the list of cards is missing or too long")
    return tuple(CardReport.parse(one) for one in told)


def verdict(state: CardState, guest: str, *, lacks: bool) -> Settled:
    """Return the result of an orphaned replacement. Pure.

    `state`: of the card whose replacement was interrupted; `lacks`: whether the guest still needs
    changes.
    """
    if state is CardState.OLD:
        return Settled(
            truth=f"a network card of {guest} is still plugged in, but {guest} may have been asked"
            " to release it",
            outcome=None,
            settle=f"reboot {guest}, or shut it down and start it again; then run vmckpt recover",
        )
    outcome = Outcome.FAILED if lacks else Outcome.COMPLETED
    if state is CardState.ABSENT:
        return Settled(
            truth=f"a network card of {guest} was unplugged", outcome=outcome,
            did=("plug the network card in again",),
        )  # fmt: skip
    if state is CardState.LEFT:
        truth = f"{guest} was stopped while its network cards were being replaced"
    else:
        truth = f"all network cards of {guest} are plugged in"
    return Settled(truth=truth, outcome=outcome)
