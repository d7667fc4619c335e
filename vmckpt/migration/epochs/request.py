"""The request to both agents, and the preflight findings, of a migration in mode checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from shlex import quote

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.migration.plan.facts import Facts
from vmckpt.migration.plan.storage_checks import LIBVIRT_DECIDES
from vmckpt.model.disk import CopyPlan
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.policy.model import Failover, Policy, Protection
from vmckpt.protection import agent_client, gather, preflight
from vmckpt.protection.request import Move, ProtectRequest, Setting
from vmckpt.units import Seconds

_NOT_OURS = ("tcg-lost-writes", "client-driven")
"""Codes of findings that concern only QEMU's own migration stream."""
_INTERVAL = Seconds(0.2)
"""Longest time between two epochs, which limits the size of the last epoch. A policy may set a
shorter interval."""


def request(policy: Policy, guest: Guest, target: str, copies: CopyPlan) -> ProtectRequest:
    """Return the request to send to both agents."""
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
    """Return the preflight findings of mode checkpoint.

    `others`: the findings of all modes. Those that concern only QEMU's own stream are left out, and
    warnings about unproven storage become blockers. If nothing blocks the migration, findings about
    what the guest and the hosts lack for this mode are added.
    """
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
        hint = exc.hint or f"run vmckpt doctor {quote(source.name)} {quote(target.name)}"
        return (*kept, _blocker(guest.name, exc.message, hint))
    copied = [disk for disk in seen.disks if disk["name"] in copies.disks]
    return (*kept, *preflight.check_move(replace(seen, disks=copied)))


def _stricter(one: Finding) -> Finding:
    """Return the finding; a warning about unproven storage becomes a blocker.

    libvirt does not check storage in this mode: a standby opens any file with the disk's name.
    """
    if one.code != "storage-unproven":
        return one
    text = one.text.removesuffix(LIBVIRT_DECIDES)
    return replace(
        one, severity=Severity.BLOCKER, text=f"{text}; mode checkpoint does not check this"
    )


def _blocker(where: str, text: str, hint: str) -> Finding:
    return Finding(
        code="no-checkpoints", severity=Severity.BLOCKER, where=where, hint=hint,
        text=f"cannot be migrated in mode checkpoint: {text}",
    )  # fmt: skip
