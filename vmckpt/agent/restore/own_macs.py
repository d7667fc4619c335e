"""Give the network cards of a running fork the MAC addresses of its definition.

The memory of a snapshot contains the original's addresses: QEMU and the guest continue to use them,
whatever the definition says. Only the guest can change them while it runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vmckpt.agent import resumed_guest
from vmckpt.agent.orders import RestoreOrder
from vmckpt.definition.elements import attribute, mac_of
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.guest_agent import CHANNEL, GuestAgent
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.model.guest import GuestInterface
from vmckpt.units import Seconds

_EXITS = Seconds(15.0)
_IP = ("ip", "/sbin/ip", "/usr/sbin/ip")


@dataclass(frozen=True, slots=True, kw_only=True)
class MacResult:
    """The result of a change of MAC addresses."""

    kept: str = ""
    """Why a card may still have the original's address; empty: all cards have their own."""
    addresses: tuple[str, ...] = ()
    """IP addresses of the guest, each with its interface; empty if no MAC address was changed."""


@dataclass(frozen=True, slots=True)
class Change:
    """A card that needs another MAC address."""

    alias: str
    old: str
    new: str


def needed(
    cards: Sequence[tuple[str, str]], originals: Sequence[str], reported: Mapping[str, str]
) -> tuple[Change, ...]:
    """Return the cards that do not have the address of their definition. Pure.

    `cards`: alias and address of each card of the fork. `originals`: addresses in the original's
    definition, in the same order. `reported`: addresses that QEMU reports, by alias; QEMU reports
    only the addresses of virtio cards.
    """
    known = [*originals, *("" for _ in cards[len(originals) :])]
    found = [Change(alias, reported.get(alias, old), new)
             for (alias, new), old in zip(cards, known, strict=False)]  # fmt: skip
    return tuple(one for one in found if one.old != one.new)


def give_own_macs(order: RestoreOrder, original: str) -> MacResult:
    """Change the addresses through the guest agent, and check them in QEMU.

    `original`: the definition in the snapshot.
    """
    if not _cards_of(original):
        return MacResult()
    if order.paused:
        return MacResult(kept="the guest is paused")
    if CHANNEL not in original:
        return MacResult(kept="the guest has no guest agent")
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            cards, originals = _cards(monitor.described()), _cards_of(original)
            changes = needed(cards, originals, _reported(monitor))
            return _changed(monitor, GuestAgent(monitor), changes) if changes else MacResult()
    except HypervisorError as exc:
        return MacResult(kept=exc.message)


def kept_macs(order: RestoreOrder, why: str) -> str:
    """Return the message for a fork whose cards may have the original's addresses.

    `why`: a clause that follows "because".
    """
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            name, macs = monitor.name, [mac for _, mac in _cards(monitor.described())]
    except HypervisorError:
        name, macs = order.guest, []
    ups = "; ".join(f"virsh domif-setlink {name} {mac or 'MAC'} up" for mac in macs or [""])
    return (
        f"the network cards of {name} may still have the original's MAC addresses, because {why};"
        f" their links stay down. To connect {name}, restart it with its own addresses:"
        f" virsh destroy {name}; virsh start {name}; {ups}"
    )


def same_addresses(order: RestoreOrder, before: MacResult) -> Iterator[str]:
    """Yield a warning if the guest still has IP addresses of its original.

    `before`: the result of the MAC change, which lists the original's addresses. Yields nothing if
    the guest agent does not answer.
    """
    if not before.addresses:
        return
    try:
        with QmpMonitor(order.guest, host=order.host, uri=order.uri) as monitor:
            name, now = monitor.name, _addresses(GuestAgent(monitor).interfaces())
    except HypervisorError:
        return
    if same := [one for one in before.addresses if one in now]:
        yield (
            f"{name} has the IP addresses of its original: {', '.join(same)}; if both"
            f" guests are on one network, change the addresses of {name} (a command given with"
            " --on-restore can do this before the links are up)"
        )


def _changed(monitor: QmpMonitor, agent: GuestAgent, changes: Sequence[Change]) -> MacResult:
    if not resumed_guest.answers(agent):
        return MacResult(kept="its guest agent does not answer")
    interfaces = agent.interfaces()
    for change in changes:
        if (why := _change(agent, change, interfaces)) is not None:
            return MacResult(kept=why)
    after = agent.interfaces()
    reported = _reported(monitor)
    for change in changes:
        now = reported.get(change.alias)
        if now is None:  # not a virtio card: only the guest knows
            now = change.old if any(one.mac == change.old for one in after) else change.new
        if now != change.new:
            return MacResult(kept=f"network card {change.alias} still has {now}")
    return MacResult(addresses=_addresses(after))


def _change(agent: GuestAgent, change: Change, seen: Sequence[GuestInterface]) -> str | None:
    """Change the address of one card. Returns why this failed; None if it succeeded."""
    names = [one.name for one in seen if one.mac == change.old]
    if len(names) > 1:  # VLANs and bridges have the address of their card
        names = [name for name in names if _is_card(agent, name)]
    if len(names) != 1:
        count = (
            "no network interface"
            if not names
            else f"more than one interface, for example {names[0]},"
        )
        return f"{count} in the guest has the MAC address {change.old}"
    why = ""
    for program in _IP:
        try:
            words = ("link", "set", "dev", names[0], "address", change.new)
            status, said = agent.execute(program, *words, limit=_EXITS)
        except HypervisorError as exc:
            why = why or exc.message
            continue
        failed = f"{program} {' '.join(words)}: {said or f'exit status {status}'}"
        return None if status == 0 else failed
    return f"the guest agent cannot run ip: {why}"


def _is_card(agent: GuestAgent, name: str) -> bool:
    path = f"/sys/class/net/{name}/device"
    return agent.execute("test", "-e", path, limit=_EXITS)[0] == 0


def _cards(xml: str) -> list[tuple[str, str]]:
    return [
        (alias, mac)
        for card in domain_xml.tree(xml, "domain").findall("devices/interface")
        if (alias := attribute(card, "alias", "name")) is not None and (mac := mac_of(card))
    ]


def _cards_of(xml: str) -> list[str]:
    return [mac_of(card) for card in domain_xml.tree(xml, "domain").findall("devices/interface")]


def _reported(monitor: QmpMonitor) -> dict[str, str]:
    told: Any = monitor.ask("query-rx-filter")
    with suppress(TypeError, LookupError):
        return {str(one["name"]): str(one["main-mac"]).lower() for one in told}
    raise HypervisorError(
        f"{monitor.host}: QEMU gave an invalid answer to query-rx-filter", host=monitor.host
    )


def _addresses(interfaces: Sequence[GuestInterface]) -> tuple[str, ...]:
    def each() -> Iterator[str]:
        for one in interfaces:
            yield from (f"{address} ({one.name})" for address in one.addresses)

    return tuple(each())
