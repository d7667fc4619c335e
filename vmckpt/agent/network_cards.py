"""Replace network cards of a running guest: unplug each card, and plug it in again.

Right before a card is unplugged, a record of the card is written to /run/vmckpt/cards. The record
is removed once the card is plugged in. If this process is killed in between, the next order
finishes the replacement. If the controller disappears, a card that is being replaced is still
plugged in again; further cards are not replaced.
"""

import dataclasses
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, Self

from vmckpt.agent.orders import CardsOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.agent.snapshot import spool
from vmckpt.capture import network_cards as rules
from vmckpt.capture import network_hold
from vmckpt.capture.network_cards import CardReport, CardState, Replacement
from vmckpt.errors import BadInput, HypervisorError, OutcomeUnknown, VmckptError
from vmckpt.hypervisor import hotplug
from vmckpt.hypervisor.connection import NOT_HERE
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.guest import GuestInterface
from vmckpt.units import Seconds, show_seconds
from vmckpt.util import atomic_file
from vmckpt.util.host_directories import RUN, run_dir

_FOLDER = "cards"
_PATIENCE = Seconds(60.0)
"""How long to wait for an agent that is still replacing a card of the same guest."""
_RELEASE = Seconds(30.0)
"""Time limit for the guest to release a card. PCIe's native hotplug takes 5 to 6 s."""
_AGAIN = Seconds(3.0)
"""Interval between requests to release a card: a busy or booting guest may lose a request."""
_RETURN = Seconds(60.0)
"""Time limit for the addresses of a new card, for example until the guest has a DHCP lease."""
_TURN = Seconds(0.05)
_ASKS = Seconds(1.0)
"""Time limit for one question to the guest agent while waiting for the addresses."""
_TRIES = 3
"""How often to try to plug in the new card before other elements are tried."""


def carry_out(order: CardsOrder, channel: ControllerChannel) -> dict[str, Any]:
    """Carry out an order.

    Returns "cards" (as CardReport.to_json) for `look` and `replace`, "state" (CardState) for `look`
    and `finish`, and "refused" for `look`. Raises BadInput if the cards cannot be replaced,
    GuestLocked, HypervisorError, RemoteError, OSError, ValueError. If a card is unplugged or may
    still be released, the error's `undone` is false.
    """
    if order.what == "look":
        return _look(order)
    record = run_dir(_FOLDER) / f"{order.guest}.json"
    with spool.held(record.with_suffix(""), patience=_PATIENCE):
        try:
            if order.what == "finish":
                return {"state": str(_finish(order, record))}
            return {"cards": [one.to_json() for one in _replace_all(order, record, channel.stop)]}
        except VmckptError as exc:
            if record.exists():
                exc.undone = False
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A card that is being replaced."""

    run: int
    """See hotplug.run_id."""
    card: Replacement

    def write(self, path: Path) -> None:
        atomic_file.put(path, json.dumps(asdict(self)), private=True)

    @classmethod
    def read(cls, path: Path, host: str) -> Self | None:
        """Return the record; None if there is none. Raises OSError, HypervisorError."""
        try:
            told = json.loads(path.read_text())
            return cls(run=int(told["run"]), card=Replacement.from_json(told["card"]))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError) as exc:
            raise HypervisorError(
                f"{host}: {path} is not a valid record of a network card: {exc}",
                host=host,
                hint="check the guest's network cards with virsh domiflist GUEST, then remove the"
                " file",
            ) from exc


def _look(order: CardsOrder) -> dict[str, Any]:
    with _opened(order) as monitor:
        wanted = _wanted(order, monitor)
        before = _interfaces(monitor)
        record = _Record.read(RUN / _FOLDER / f"{order.guest}.json", order.host)
        state = CardState.NOTHING if record is None else _state(monitor, record)
        return {
            "cards": [_report(one, before).to_json() for one in wanted],
            "refused": _refusal(monitor, wanted), "state": str(state),
        }  # fmt: skip


def _opened(order: CardsOrder) -> QmpMonitor:
    return QmpMonitor(order.guest, host=order.host, uri=order.uri)


def _wanted(order: CardsOrder, monitor: QmpMonitor) -> tuple[Replacement, ...]:
    vhost = network_hold.uses_vhost(order.guest)
    return rules.replacements(monitor.described(), vhost=vhost, chosen=order.cards)


def _refusal(monitor: QmpMonitor, wanted: Sequence[Replacement]) -> str | None:
    """Return why the cards cannot be replaced now; None if no reason is known."""
    if (state := monitor.run_state()) != "running":
        return f"the guest's run state is {state}, and only a running guest can release a card"
    for card in wanted:
        source = rules.source_of(card.new)
        if source is not None and not _is_there(monitor, *source):
            return f"{card.card} is connected to {source[1]}, which is not active or does not exist"
    return rules.refusal(monitor.described(), wanted)


def _is_there(monitor: QmpMonitor, kind: str, name: str) -> bool:
    if kind == "network":
        return hotplug.network_is_active(monitor, name)
    with suppress(OSError):
        return socket.if_nametoindex(name) > 0
    return False


def _interfaces(monitor: QmpMonitor, limit: Seconds | None = None) -> Sequence[GuestInterface]:
    """Return the guest's interfaces; empty if no guest agent reports them."""
    agent = GuestAgent(monitor)
    with suppress(HypervisorError):
        if limit is not None:
            return agent.interfaces(limit=limit)
        return agent.interfaces() if agent.there() else ()
    return ()


def _report(card: Replacement, before: Sequence[GuestInterface]) -> CardReport:
    return CardReport(
        card=card.card, mac=card.mac, why=card.why, agent=bool(before),
        addresses=rules.awaited(before, card.mac), sharers=rules.sharers(before, card.mac),
    )  # fmt: skip


def _state(monitor: QmpMonitor, record: _Record) -> CardState:
    same = hotplug.run_id(monitor) == record.run
    return rules.interrupted(monitor.described() if same else None, record.card)


def _finish(order: CardsOrder, path: Path) -> CardState:
    """Finish an interrupted replacement, unless `order.dry`. Returns the state found before."""
    record = _Record.read(path, order.host)
    if record is None:
        return CardState.NOTHING
    try:
        monitor = _opened(order)
    except HypervisorError as exc:
        if exc.code not in NOT_HERE:
            raise
        state = CardState.LEFT
    else:
        with monitor:
            state = _state(monitor, record)
            if state is CardState.ABSENT and not order.dry:
                _plug_in(monitor, record.card, path)
    if state is not CardState.OLD and not order.dry:
        path.unlink(missing_ok=True)
    return state


def _replace_all(order: CardsOrder, path: Path, stop: Event) -> Iterator[CardReport]:
    """Replace the cards one after the other. Yields a report for each card.

    After a card whose addresses did not return, no further card is replaced. Raises BadInput,
    HypervisorError.
    """
    if _finish(order, path) is CardState.OLD:
        raise HypervisorError(
            f"{order.host}: an earlier replacement of a network card was interrupted, and the guest"
            " may still release that card",
            host=order.host, hint="shut the guest down and start it again, then run vmckpt recover",
        )  # fmt: skip
    with _opened(order) as monitor:
        wanted = _wanted(order, monitor)
        if (why := _refusal(monitor, wanted)) is not None:
            raise BadInput(
                f"the network cards of {monitor.name} on {order.host} cannot be replaced: {why}",
                hint=f"remove the cause and try again, or shut {monitor.name} down and start it"
                " again",
            )
        before = _interfaces(monitor)
        goes_on = True
        for card in wanted:
            report = _report(card, before)
            if goes_on and not stop.is_set():
                report = _Replacing(monitor, card, path, stop).replace(report)
                goes_on = report.confirmed is not False
            yield report


class _Replacing:
    """The replacement of one card."""

    def __init__(self, monitor: QmpMonitor, card: Replacement, path: Path, stop: Event) -> None:
        self._monitor, self._card, self._path, self._stop = monitor, card, path, stop
        self._called = f"network card {card.card} ({card.mac})"

    def replace(self, report: CardReport) -> CardReport:
        """Replace the card. Returns its report, completed. Raises HypervisorError, OSError."""
        run = hotplug.run_id(self._monitor)
        if run is None:
            host = self._monitor.host
            raise HypervisorError(f"{host}: {self._monitor.name} has stopped", host=host)
        _Record(run=run, card=self._card).write(self._path)
        self._unplug()
        gone = time.monotonic()
        _plug_in(self._monitor, self._card, self._path)
        ended, lacks = time.monotonic(), report.addresses
        while lacks and not self._stop.is_set() and time.monotonic() - gone < _RETURN:
            time.sleep(_TURN)
            now = _interfaces(self._monitor, _ASKS)
            lacks, ended = rules.missing(lacks, now, self._card.mac), time.monotonic()
        return dataclasses.replace(report, replaced=True, gone=Seconds(ended - gone), missing=lacks)

    def _unplug(self) -> None:
        """Unplug the card, and wait until the guest has released it. Raises HypervisorError."""
        host, name = self._monitor.host, self._monitor.name
        give_up = time.monotonic() + _RELEASE
        try:
            hotplug.unplug(self._monitor, self._card.old)
        except OutcomeUnknown:
            pass  # the guest may have been asked
        except HypervisorError as exc:
            if self._is_plugged():
                self._path.unlink()
                raise HypervisorError(
                    f"{host}: {name} keeps its {self._called}: {exc.message}",
                    host=host,
                    code=exc.code,
                    hint=f"shut {name} down and start it again instead",
                ) from exc
        asked = time.monotonic()
        while self._is_plugged():
            if time.monotonic() > asked + _AGAIN:
                with suppress(HypervisorError):  # QEMU refuses while the request is still pending
                    hotplug.unplug(self._monitor, self._card.old)
                asked = time.monotonic()
                continue
            if time.monotonic() > give_up:
                raise HypervisorError(
                    f"{host}: {name} did not release its {self._called} within"
                    f" {show_seconds(_RELEASE)}; it may still do so, for example when it is"
                    " rebooted",
                    host=host,
                    hint=f"run vmckpt recover after a reboot of {name}: it plugs the card in again",
                )
            time.sleep(_TURN)

    def _is_plugged(self) -> bool:
        return rules.plugged(self._monitor.described(), self._card.mac) is not None


def _plug_in(monitor: QmpMonitor, card: Replacement, path: Path) -> None:
    """Plug a card in, and remove its record.

    Raises HypervisorError if the old card or no card is plugged in. Without a card, the record is
    kept.
    """
    try:
        _plug(monitor, card)
    finally:
        if rules.plugged(monitor.described(), card.mac) is not None:
            path.unlink(missing_ok=True)


def _plug(monitor: QmpMonitor, card: Replacement) -> None:
    """Plug in the new card; if libvirt keeps refusing it, the old card.

    Raises HypervisorError if the old card or no card is plugged in.
    """
    host, name = monitor.host, monitor.name
    called = f"network card {card.card} ({card.mac})"
    failed: HypervisorError | None = None
    for element in (*[card.new] * _TRIES, rules.renamed(card.new)):
        try:
            hotplug.plug(monitor, element)
        except HypervisorError as exc:
            failed = failed or exc
            if rules.plugged(monitor.described(), card.mac) is not None:
                return
            time.sleep(_TURN)
        else:
            return
    assert failed is not None
    try:
        hotplug.plug(monitor, rules.renamed(card.old))
    except HypervisorError as exc:
        raise HypervisorError(
            f"{host}: {called} of {name} was unplugged and cannot be plugged in again:"
            f" {failed.message}",
            host=host,
            hint="remove the cause, then run vmckpt recover: it plugs the card in again",
        ) from exc
    raise HypervisorError(
        f"{host}: the old {called} of {name} is plugged in again, because libvirt refused the new"
        f" card: {failed.message}",
        host=host, hint=f"shut {name} down and start it again instead",
    )  # fmt: skip
