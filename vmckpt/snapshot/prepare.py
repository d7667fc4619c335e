"""Prepare a guest for snapshots: change its stored definition in a journaled job, with a lease."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.capture.prepare_domain import Prepared, prepare
from vmckpt.errors import BadInput, GuestLocked
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import Definition
from vmckpt.journal.recorder import JournalStepLog, OrphanedJob, Recorder, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.model.events import Caller
from vmckpt.model.finding import Finding
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy


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
        }


async def readiness(host: Host, name: str) -> Readiness:
    """Return what a guest's definition lacks. Raises BadInput, HypervisorError."""
    async with Hypervisor(host) as hypervisor:
        guest = await _guest(hypervisor, name)
        _, found = await _read(hypervisor, guest)
        return _told(host, guest, found)


async def make_ready(host: Host, name: str, caller: Caller) -> Readiness:
    """Add what a guest's stored definition lacks. A running guest is not affected.

    Raises BadInput, GuestLocked, HypervisorError, JournalError or LeaseLost; OutcomeUnknown if it
    is not known whether the definition was changed.
    """
    async with Hypervisor(host) as hypervisor:
        guest = await _guest(hypervisor, name)
        if guest.locked:
            raise GuestLocked(
                f"guest {guest.name} on {host.name} is locked by a job: {guest.job}; nothing was"
                " changed",
                hint="run vmckpt prepare again when the job has ended",
            )
        new = NewOperation(
            kind="prepare", guest=guest.name, guest_uuid=guest.uuid, source=host.name, detail={}
        )
        async with recorded(new, guest.uuid, caller.warn) as recorder:
            definition, found = await _read(hypervisor, guest)
            if found.xml is not None:
                await _write(hypervisor, guest, definition, found.xml, recorder)
            done = _told(host, guest, found, changed=found.xml is not None, job=recorder.id)
            recorder.finish(Outcome.COMPLETED, done.as_json())
            return done


async def _write(
    hypervisor: Hypervisor, guest: Guest, definition: Definition, xml: str, recorder: Recorder
) -> None:
    JournalStepLog(recorder).check()  # the lease must still be held
    await domains.write(hypervisor, guest.uuid, xml, instead_of=definition.text)


async def _guest(hypervisor: Hypervisor, name: str) -> Guest:
    guest = await domains.find_guest(hypervisor, name)
    if guest is None:
        raise BadInput(f"{hypervisor.host.name} has no guest {name}", hint="run vmckpt guests")
    return guest


async def _read(hypervisor: Hypervisor, guest: Guest) -> tuple[Definition, Prepared]:
    found = await domains.stored_definition(hypervisor, guest.uuid)
    return found, prepare(found.text, found.running, found.disks)


def _told(
    host: Host, guest: Guest, found: Prepared, *, changed: bool = False, job: str | None = None
) -> Readiness:
    return Readiness(
        guest=guest.name, host=host.name, findings=found.findings, lacks=found.xml is not None,
        restart=found.restart, changed=changed, job=job,
    )  # fmt: skip


async def settle(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """See recovery.Handler. libvirt stores a definition completely or not at all."""
    del policies
    found = await readiness(case.host, case.operation.guest_uuid or case.operation.guest)
    told = (
        Settled(truth="the guest's definition was not changed", outcome=Outcome.FAILED)
        if found.lacks
        else Settled(truth="the guest's definition was prepared", outcome=Outcome.COMPLETED)
    )
    return case.ended(told)
