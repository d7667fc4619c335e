"""Hosts and guests as they are seen before they are emptied, to be changed by tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.builders import GUEST, HOST, host_facts
from vmckpt.evacuation.plan import inventory as sights
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.inventory import (
    Answers,
    FleetView,
    Look,
)
from vmckpt.evacuation.task import Kind, Task, terms
from vmckpt.model.guest import Disk, Guest
from vmckpt.policy import parse
from vmckpt.policy.model import Policy
from vmckpt.units import GIB, MIB, Bytes

TEXT = "version: vmckpt/v1\nname: {name}\nevacuate: {{{keys}}}\n"


def by(keys: str = "", *, name: str = "mine") -> Policy:
    """A policy with these keys in its section for emptying, in YAML's short form."""
    return parse.parse(TEXT.format(name=name, keys=keys), Path("mine.yaml"))


def vm(name: str, **more: Any) -> Guest:
    """256 MiB, one disk of its own."""
    disk = Disk(
        target="vda", kind="file", source=f"/srv/{name}.raw", cache="none", read_only=False,
        shareable=False,
    )  # fmt: skip
    made = replace(GUEST, name=name, uuid=f"u-{name}", disks=(disk,), **more)
    return replace(made, memory=Bytes(256 * MIB)) if "memory" not in more else made


def at(name: str, *guests: Guest, free: int = 8 * GIB, **more: Any) -> Look:
    """A host with those guests, that shares its storage with all others."""
    facts = replace(host_facts(name), memory=Bytes(64 * GIB), memory_free=Bytes(free))
    usual: dict[str, Any] = {"links": frozenset({"lo", "br0"}), "facts": facts}
    return Look(host=replace(HOST, name=name), guests=guests, **(usual | more))


def answers(*looks: Look, **more: Any) -> Answers:
    """Everything is shared and every CPU fits, unless said otherwise."""
    everywhere: dict[tuple[str, str], dict[str, bool]] = {
        (one.host.name, other.host.name): {
            file: True for guest in one.guests for file in sights.files(guest)
        }
        for one in looks for other in looks
    }  # fmt: skip
    kinds = frozenset(sights.cpu(guest) for one in looks for guest in one.guests)
    usual: dict[str, Any] = {
        "same": everywhere, "fits": {one.host.name: kinds for one in looks},
    }  # fmt: skip
    return Answers(looks=looks, **(usual | more))


def seen(
    told: Answers, policy: Policy | None = None, own: Mapping[str, Policy] = {},
    emptied: str | None = None,
) -> FleetView:  # fmt: skip
    """`own`: policies of guests, by name."""
    usual = policy or by()
    policies = {
        (one.host.name, guest.uuid): own.get(guest.name, usual)
        for one in told.looks for guest in one.guests
    }  # fmt: skip
    return sights.fleet_view(told, policies, usual.evacuation, emptied)


EMPTY = Task(kind=Kind.EVACUATE, host="alpha")


def placed(
    told: Answers,
    task: Task = EMPTY,
    policy: Policy | None = None,
    own: Mapping[str, Policy] = MappingProxyType({}),
) -> tuple[dict[str, str], dict[str, str]]:
    """Where each guest goes, and why the others stay."""
    found = seen(told, policy, own, task.host if task.kind is Kind.EVACUATE else None)
    run = (policy or by()).evacuation
    made = plans.placed(task.fleet(found), task.asked(found), terms(run, task.kind))
    return (
        {one.tenant.name: one.target for one in made.going},
        {one.tenant.name: one.why for one in made.left},
    )
