"""What is asked of agents to move a guest by epochs, and what is against that."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration.plan.preflight import Facts
from vmckpt.model.disk import CopyPlan
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.policy.model import Failover, Policy, Protection
from vmckpt.protection import agent_client, gather, preflight
from vmckpt.protection.request import Move, ProtectRequest, Setting
from vmckpt.units import Seconds

_NOT_OURS = ("tcg-lost-writes", "client-driven")
"""Findings about QEMU's own stream."""
_INTERVAL = Seconds(0.2)
"""Between two epochs, if the policy does not want shorter ones: what the last one holds is no
older."""


def request(policy: Policy, guest: Guest, target: str, copies: CopyPlan) -> ProtectRequest:
    """What is asked of both agents."""
    usual = policy.protection
    terms = Protection(
        interval=min(usual.interval or _INTERVAL, _INTERVAL), failover=Failover.MANUAL,
        slowdown=usual.slowdown, hold=usual.hold, max_pause=policy.limits.max_downtime,
    )  # fmt: skip
    images = {copy.name: copy.path for copy in copies.copies}
    return ProtectRequest(
        guest=guest.name, to=target, terms=terms,
        storage=str(PurePosixPath(copies.copies[0].path).parent) if copies.copies else None,
        move=Move(images=images, bandwidth=policy.limits.bandwidth),
    )  # fmt: skip


async def findings(
    others: Sequence[Finding],
    policy: Policy,
    facts: Facts,
    copies: CopyPlan,
    hosts: tuple[Hypervisor, Hypervisor],
) -> tuple[Finding, ...]:
    """`others`, as far as they are about this mode, and what guest and hosts lack for it."""
    kept = tuple(_stricter(one) for one in others if one.code not in _NOT_OURS)
    guest = facts.guest
    if guest is None or any(one.severity is Severity.BLOCKER for one in kept):
        return kept
    source, target = (one.host for one in hosts)
    setting = Setting(primary=source, backup=target, lease=None)
    try:
        looked = await agent_client.order(source, guest.uuid, "look")
        seen = await gather.seen(
            setting, request(policy, guest, target.name, copies), guest, looked
        )  # fmt: skip
    except VmckptError as exc:
        hint = exc.hint or f"run vmckpt prepare {guest.name}"
        return (*kept, _blocker(guest.name, exc.message, hint))
    copied = [disk for disk in seen.disks if disk["name"] in copies.disks]
    return (*kept, *preflight.check_move(replace(seen, disks=copied)))


def _stricter(one: Finding) -> Finding:
    """libvirt is not asked: a standby opens whatever has the disk's name there."""
    if one.code != "storage-unproven":
        return one
    text = one.text.replace("; libvirt decides", "; by epochs it would not be noticed")
    return replace(one, severity=Severity.BLOCKER, text=text)


def _blocker(where: str, text: str, hint: str) -> Finding:
    return Finding(
        code="no-checkpoints", severity=Severity.BLOCKER, where=where, hint=hint,
        text=f"cannot be moved by epochs: {text}",
    )  # fmt: skip
