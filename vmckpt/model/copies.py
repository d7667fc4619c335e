"""Whether a guest has two copies: the decision that every list, metric and alert shows. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vmckpt.errors import TwoCopies
from vmckpt.model.guests import GuestState

MEND = "run vmckpt recover; end the copy that is not needed"


class Seen(Protocol):
    """A guest as libvirt shows it on one host."""

    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def state(self) -> GuestState: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A guest that runs on two hosts, or on one while another holds its lease."""

    guest: str
    """Its name."""
    uuid: str
    hosts: tuple[str, ...]
    """Where a copy is, or may be."""
    why: str = field(default="", compare=False)
    """What the agents say; empty: its CPUs run on each of the hosts."""

    @property
    def text(self) -> str:
        """In one line."""
        told = f": {self.why}" if self.why else ""
        return f"{self.guest} runs on {' and '.join(self.hosts)}{told}"

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "uuid": self.uuid, "hosts": list(self.hosts), "text": self.text,
        }  # fmt: skip


def two_copies(
    found: Iterable[tuple[str, Seen]], told: Iterable[Copies] = ()
) -> tuple[Copies, ...]:
    """Decide which guests have two copies; one entry per guest.

    `found`: hosts with the guests that libvirt shows there; `told`: what agents say of protected
    guests (see protect.copies.of_protections).
    """
    hosts: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for host, guest in found:
        if guest.state.runs:
            hosts.setdefault(guest.uuid, []).append(host)
            names[guest.uuid] = guest.name
    copies = {
        uuid: Copies(guest=names[uuid], uuid=uuid, hosts=tuple(where))
        for uuid, where in hosts.items() if len(where) > 1
    }  # fmt: skip
    return merged(copies.values(), told)


def merged(*several: Iterable[Copies]) -> tuple[Copies, ...]:
    """One entry per guest, with all its hosts and the first reason."""
    known: dict[str, Copies] = {}
    for some in several:
        for one in some:
            old = known.get(one.uuid, one)
            hosts = tuple(dict.fromkeys((*old.hosts, *one.hosts)))
            known[one.uuid] = replace(old, hosts=hosts, why=old.why or one.why)
    return tuple(known.values())


def confirmed(
    copies: Sequence[Copies], since: Mapping[str, float], looked: Mapping[str, float]
) -> tuple[Copies, ...]:
    """Leave out what a guest may be that moved between two looks at its hosts.

    `since`: when each guest (its UUID) was first seen so; `looked`: when each host was asked last.
    A guest that was seen to run on both before, and is seen so by looks that began since, does.
    """
    return tuple(
        one for one in copies
        if one.uuid in since and all(looked.get(host, 0.0) > since[one.uuid] for host in one.hosts)
    )  # fmt: skip


def error(copies: Sequence[Copies]) -> TwoCopies:
    """The error that a command ends with."""
    return TwoCopies("; ".join(one.text for one in copies), mend=MEND)
