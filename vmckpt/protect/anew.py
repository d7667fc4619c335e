"""Another standby for a guest that has one: the host where it waits is wanted empty.

A guest has one standby at a time, so the old one ends before the new one begins: until the first
copy is there, nothing could take over.
"""

from dataclasses import dataclass, replace

from vmckpt.errors import BadInput
from vmckpt.model.callers import Caller
from vmckpt.model.findings import Finding
from vmckpt.model.hosts import Host
from vmckpt.policy.protection import Failover, Protection
from vmckpt.protect import ending, engine
from vmckpt.protect.ending import Known
from vmckpt.protect.engine import Setting
from vmckpt.protect.requests import Protected, ProtectRequest

_HELD = ("memory-short", "tmpfs-short")
"""What the present standby's copies hold on the guest's own host is free for the next one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anew:
    """A protection, and the host that is to have its standby."""

    known: Known
    backup: Host
    lease: str | None
    """Where the inventory keeps leases."""
    usual: Protection
    """By the guest's policy, for a protection whose own terms are not in the journal."""

    @property
    def setting(self) -> Setting:
        return Setting(primary=self.known.primary, backup=self.backup, lease=self.lease)

    @property
    def request(self) -> ProtectRequest:
        """On the terms that it is protected on now. Its images go where the new host has them."""
        told = self.known.operation.detail
        automatic = Failover.AUTOMATIC if told.get("automatic") else Failover.MANUAL
        terms = replace(self.usual, failover=automatic)
        if (kept := told.get("terms")) is not None:
            terms = Protection.from_json(kept)
        return ProtectRequest(guest=self.known.uuid, to=self.backup.name, terms=terms)


async def check(anew: Anew, caller: Caller) -> list[Finding]:
    """What speaks against it; changes nothing. Raises VmckptError."""
    found = await engine.protect(
        anew.setting, replace(anew.request, dry_run=True), caller, _nothing
    )
    here = anew.known.primary.name
    return [one for one in found.findings if one.code not in _HELD or one.where != here]


async def move(anew: Anew, caller: Caller) -> Protected:
    """End the present protection and begin the next; returns once its standby is ready.

    Raises VmckptError: the guest runs on, and may have no standby.
    """
    ended = await ending.unprotect(anew.known, caller)
    if ended.runs_on != anew.known.primary.name:
        raise BadInput(
            f"{ended.guest} runs on {ended.runs_on} since a failover, without a standby",
            mend=f"vmckpt protect {ended.guest} --to {anew.backup.name}",
        )
    return await engine.protect(anew.setting, anew.request, caller, _nothing)


def _nothing(_: dict[str, object]) -> None:
    """How far the first copy is, nobody asks."""
