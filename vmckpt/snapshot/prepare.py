"""Prepare a guest for snapshots and replication, in a journaled job with a lease.

The guest's stored definition is changed, and on request, network cards of the running guest.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vmckpt.capture.network_cards import CardState
from vmckpt.capture.prepare_domain import LIVE_CODES, Prepared, prepare
from vmckpt.errors import BadInput, GuestLocked, RemoteError
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import Definition
from vmckpt.journal.cancel_requests import cancellable_job
from vmckpt.journal.recorder import JournalStepLog, OrphanedJob, Recorder, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.model.events import Caller
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.remote import probe
from vmckpt.remote.ssh import Remote
from vmckpt.snapshot import live_cards
from vmckpt.snapshot.live_cards import LiveCards
from vmckpt.snapshot.request import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a guest is prepared, and what was changed."""

    guest: str
    host: str
    findings: tuple[Finding, ...]
    lacks: bool
    """Whether the guest's stored definition needs changes."""
    restart: bool
    """Whether the guest must be shut down and started for the definition to take effect."""
    changed: bool = False
    job: str | None = None
    live: LiveCards | None = None
    """The running guest's network cards; None: they were not requested."""

    @property
    def to_do(self) -> bool:
        """Whether `make_ready` would change anything."""
        return self.lacks or (self.live is not None and self.live.to_do)

    @property
    def ready(self) -> bool:
        return not self.restart and (self.changed or not self.lacks)

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest,
            "host": self.host,
            "ready": self.ready,
            "lacks": self.lacks,
            "changed": self.changed,
            "restart": self.restart,
            "findings": [one.as_json() for one in self.findings],
            "job": self.job,
            "cards": None if self.live is None else [one.as_json() for one in self.live.cards],
            "cards_refused": None if self.live is None else self.live.refused,
        }


async def readiness(host: Host, name: str, caller: Caller, *, live: bool = False) -> Readiness:
    """Return what a guest's definition lacks. Changes nothing.

    `live`: also return the running guest's network cards that must be replaced. Raises BadInput,
    HypervisorError, and if `live`, RemoteError.
    """
    async with Hypervisor(host) as hypervisor:
        guest = await _guest(hypervisor, name, live=live)
        _, found = await _read(hypervisor, guest)
        cards = await live_cards.look(host, guest.uuid, caller) if live else None
        return _told(host, guest, found, live=cards)


async def make_ready(host: Host, name: str, caller: Caller, *, live: bool = False) -> Readiness:
    """Add to a guest's stored definition what snapshots and protections require.

    `live`: also replace network cards of the running guest whose output cannot be buffered; without
    it, a running guest is not affected. Raises BadInput, GuestLocked, HypervisorError,
    JournalError, LeaseLost, and if `live`, RemoteError;
    OutcomeUnknown if it is not known whether the definition was changed.
    """
    async with Hypervisor(host) as hypervisor:
        guest = await _guest(hypervisor, name, live=live)
        if guest.locked:
            raise GuestLocked(
                f"guest {guest.name} on {host.name} is locked by a job: {guest.job}; nothing was"
                " changed",
                hint=f"run vmckpt prepare {guest.name} again when the job has ended",
            )
        new = NewOperation(
            kind="prepare", guest=guest.name, guest_uuid=guest.uuid, source=host.name, detail={}
        )
        async with (
            recorded(new, guest.uuid, caller.warn) as recorder,
            cancellable_job(recorder, caller) as mine,
        ):
            cards = await _replaceable(host, guest, mine) if live else None
            definition, found = await _read(hypervisor, guest)
            changed = found.xml is not None
            if found.xml is not None:
                await _write(hypervisor, guest, definition, found.xml, recorder)
            if cards is not None and cards.to_do:
                await _intend(cards, recorder)
                cards = await live_cards.replace(host, guest.uuid, mine)
                _, found = await _read(hypervisor, guest)
            done = _told(host, guest, found, changed=changed, job=recorder.id, live=cards)
            recorder.finish(Outcome.COMPLETED, done.as_json())
            return done


async def _replaceable(host: Host, guest: Guest, caller: Caller) -> LiveCards:
    """Return the running guest's cards that must be replaced. Raises BadInput if they cannot be."""
    seen = await live_cards.look(host, guest.uuid, caller)
    if seen.to_do and seen.refused is not None:
        raise BadInput(
            f"the network cards of {guest.name} on {host.name} cannot be replaced: {seen.refused};"
            " nothing was changed",
            hint=f"remove the cause, or run vmckpt prepare {guest.name} without --live, then shut"
            f" {guest.name} down and start it again",
        )
    return seen


async def _intend(cards: LiveCards, recorder: Recorder) -> None:
    log = JournalStepLog(recorder)
    log.check()  # the lease must still be held
    await log.intend(Step.CARDS, {"cards": [one.mac for one in cards.cards]})


async def _write(
    hypervisor: Hypervisor, guest: Guest, definition: Definition, xml: str, recorder: Recorder
) -> None:
    JournalStepLog(recorder).check()  # the lease must still be held
    await domains.write(hypervisor, guest.uuid, xml, instead_of=definition.text)


async def _guest(hypervisor: Hypervisor, name: str, *, live: bool) -> Guest:
    """Return the guest; with `live`, it must be running. Raises BadInput, HypervisorError."""
    guest = await domains.find_guest(hypervisor, name)
    if guest is None:
        raise BadInput(f"{hypervisor.host.name} has no guest {name}", hint="run vmckpt guests")
    if live and not guest.state.runs:
        raise BadInput(
            f"{guest.name} is {guest.state.in_words} on {hypervisor.host.name}: only network"
            " cards of a running guest can be replaced",
            hint=f"run vmckpt prepare {guest.name} without --live",
        )
    return guest


async def _read(hypervisor: Hypervisor, guest: Guest) -> tuple[Definition, Prepared]:
    found, finds_writes = await asyncio.gather(
        domains.stored_definition(hypervisor, guest.uuid), _finds_writes(hypervisor.host)
    )
    told = prepare(found.text, found.running, found.disks, finds_writes=finds_writes)
    return found, told


async def _finds_writes(host: Host) -> bool:
    """Return whether the host's kernel is known to find the pages that a guest writes."""
    if host.ssh is None:
        return False
    with suppress(RemoteError):
        async with Remote(host) as remote:
            return (await probe.probe_host(remote, ())).finds_writes
    return False


def _told(
    host: Host, guest: Guest, found: Prepared, *, changed: bool = False, job: str | None = None,
    live: LiveCards | None = None,
) -> Readiness:  # fmt: skip
    return Readiness(
        guest=guest.name, host=host.name, findings=found.findings, lacks=found.xml is not None,
        restart=found.restart, changed=changed, job=job, live=live,
    )  # fmt: skip


async def settle(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover an orphaned preparation; see recovery.Handler.

    libvirt stores a definition completely or not at all.
    """
    del policies
    uuid = case.operation.guest_uuid or case.operation.guest
    if case.step(Step.CARDS) is not None:
        state = await live_cards.finish(case.host, uuid, case.caller, dry=case.dry)
        lacks = True
        if state is not CardState.OLD and state is not CardState.LEFT:
            found = await readiness(case.host, uuid, case.caller)
            lacks = any(
                one.severity is Severity.WARNING and one.code in LIVE_CODES
                for one in found.findings
            )
        return case.ended(live_cards.verdict(state, case.operation.guest, lacks=lacks))
    found = await readiness(case.host, uuid, case.caller)
    told = (
        Settled(truth="the guest's definition was not changed", outcome=Outcome.FAILED)
        if found.lacks
        else Settled(truth="the guest's definition was prepared", outcome=Outcome.COMPLETED)
    )
    return case.ended(told)
