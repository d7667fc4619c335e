"""The facade: what the front ends may do, and the wiring behind it.

Commands take an inventory, report by a stream of events (`model.events`) and return frozen data.
"""

import asyncio
import difflib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from vmckpt import inventory as inventories
from vmckpt.doctor import checks
from vmckpt.doctor import gather as doctor_gather
from vmckpt.errors import (
    BadInput,
    Cancelled,
    HostUnreachable,
    HypervisorError,
    InventoryError,
)
from vmckpt.hypervisor import facts as host_facts
from vmckpt.hypervisor import guests as hypervisor_guests
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.mover import LibvirtMover
from vmckpt.inventory import Inventory
from vmckpt.lab import lab, observer_client
from vmckpt.migrate import locate, preflight
from vmckpt.migrate.engine import Emit, Ending, Migration
from vmckpt.migrate.gather import gather
from vmckpt.migrate.locate import GuestAt
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.watch import Limits
from vmckpt.model.events import Checked, PhaseChanged
from vmckpt.model.findings import Finding, Severity
from vmckpt.model.guests import Guest
from vmckpt.model.hosts import Host, HostFacts
from vmckpt.model.jobs import JobPhase, Outcome
from vmckpt.model.ports import Driver, MoveOrder
from vmckpt.units import BytesPerSecond, Seconds

T = TypeVar("T")

DEFAULT_MAX_DOWNTIME = Seconds(0.3)


def load_inventory(explicit: Path | None = None) -> Inventory:
    """`explicit`, else VMCKPT_INVENTORY, else ./hosts.yaml, else the running lab's."""
    path = inventories.find(explicit) or lab.running_inventory()
    if path is None:
        raise InventoryError(
            "no inventory: no --inventory, no VMCKPT_INVENTORY, no ./hosts.yaml, no running lab",
            mend="write a hosts.yaml (see README) or run vmckpt lab up",
        )
    return inventories.load(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """A host and what it says, or why it says nothing."""

    host: Host
    facts: HostFacts | None
    error: str | None


async def hosts(inventory: Inventory) -> list[HostView]:
    """All hosts, asked at once."""

    async def one(host: Host) -> HostView:
        async with Hypervisor(host) as hypervisor:
            try:
                return HostView(
                    host=host, facts=await host_facts.host_facts(hypervisor), error=None
                )
            except HypervisorError as exc:
                return HostView(host=host, facts=None, error=exc.message)

    return list(await asyncio.gather(*(one(host) for host in inventory.hosts.values())))


async def guests(inventory: Inventory) -> tuple[list[tuple[Host, Guest]], Mapping[str, str]]:
    """All guests of all hosts that answer, and the errors of those that do not."""

    async def one(host: Host) -> list[Guest] | str:
        async with Hypervisor(host) as hypervisor:
            try:
                return await hypervisor_guests.all_guests(hypervisor)
            except HypervisorError as exc:
                return exc.message

    everyone = list(inventory.hosts.values())
    answers = await asyncio.gather(*(one(host) for host in everyone))
    found = [
        (host, guest)
        for host, answer in zip(everyone, answers, strict=True)
        if not isinstance(answer, str)
        for guest in answer
    ]
    errors = {
        host.name: answer
        for host, answer in zip(everyone, answers, strict=True)
        if isinstance(answer, str)
    }
    return found, errors


async def doctor(inventory: Inventory, names: Sequence[str]) -> tuple[Finding, ...]:
    """Examine the named hosts, or all."""
    chosen = [inventory.host(name) for name in names] or list(inventory.hosts.values())
    examined = await doctor_gather.examine(chosen, list(inventory.hosts.values()))
    now = datetime.now(UTC)
    return tuple(finding for one in examined for finding in checks.check(one, now))


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateRequest:
    """What the operator asked for."""

    guest: str
    to: str
    from_: str | None = None
    """None: the host on which the guest is found."""
    bandwidth: BytesPerSecond | None = None
    max_downtime: Seconds = DEFAULT_MAX_DOWNTIME
    timeout: Seconds | None = None
    dry_run: bool = False


async def migrate(
    inventory: Inventory, request: MigrateRequest, emit: Emit, stop: asyncio.Event
) -> MigrationReport:
    """Migrate a guest, or with `dry_run` only say whether it could be.

    Setting `stop` cancels: the job is aborted and the guest seen running on the source. The report
    says how it ended; errors are raised only for what kept it from beginning. Cancelled is raised
    when it was stopped before anything was changed.
    """
    target = inventory.host(request.to)
    source = inventory.host(request.from_) if request.from_ else None
    if source is None:
        source = await _stoppable(_find(inventory, request.guest, request.to), stop)
    async with Hypervisor(source) as here, Hypervisor(target) as there:
        emit(PhaseChanged(phase=JobPhase.PREFLIGHT))
        facts = await _stoppable(gather(here, there, request.guest), stop)
        findings = preflight.check(facts)
        emit(Checked(findings=findings))
        if facts.guest is None or preflight.blockers(findings) or request.dry_run:
            return _not_begun(request, source, findings)
        order = MoveOrder(
            driver=Driver.CLIENT if facts.peer_login_error else Driver.PEER_TO_PEER,
            persistent=facts.guest.persistent,
            autostart=facts.guest.autostart,
            storage_proven=preflight.storage_proven(facts),
            bandwidth=request.bandwidth,
        )
        mover = LibvirtMover(here, there, facts.guest.uuid)
        limits = Limits(max_downtime=request.max_downtime, timeout=request.timeout)
        ending = await Migration(mover, limits, emit, stop).run(order)
        observed = await _observed(inventory, facts.guest.name, ending)
    return MigrationReport(
        guest=facts.guest.name,
        source=source.name,
        target=target.name,
        outcome=ending.outcome,
        driver=ending.driver,
        began=ending.began,
        elapsed=ending.elapsed,
        totals=ending.totals,
        observed_downtime=observed,
        samples=ending.samples,
        decisions=ending.decisions,
        warnings=(*_warnings(findings), *ending.warnings),
        findings=findings,
        error=ending.error,
    )


async def _find(inventory: Inventory, name: str, to: str) -> Host:
    """The host that a guest is to be moved away from.

    Raises BadInput if no host knows it, HostUnreachable if one that may know it does not answer,
    OutcomeUnknown if it is active on two hosts.
    """
    found, errors = await guests(inventory)
    called = [
        GuestAt(host=host.name, uuid=guest.uuid, state=guest.state)
        for host, guest in found
        if name in (guest.name, guest.uuid)
    ]
    states = locate.one_guest(name, called, to=to)
    holder = locate.holder(name, states, to=to)
    if holder is not None and (states[holder].is_active or not errors):
        return inventory.host(holder)
    if errors:
        silent = ", ".join(f"{host} ({error})" for host, error in errors.items())
        raise HostUnreachable(
            f"no host that answers runs guest {name}; not asked: {silent}",
            host=next(iter(errors)),
            mend="mend the host, or name the source with --from",
        )
    known = sorted({guest.name for _, guest in found})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "run vmckpt guests"
    raise BadInput(f"no guest {name!r} on {', '.join(inventory.hosts)}", mend=hint)


async def _stoppable(work: Coroutine[object, object, T], stop: asyncio.Event) -> T:
    """Wait for `work`, or for `stop`: then the work is cancelled and Cancelled raised."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        working.cancel()
        await asyncio.wait([working])
        raise Cancelled("stopped before anything was changed")
    finally:
        stopping.cancel()


def _not_begun(
    request: MigrateRequest, source: Host, findings: tuple[Finding, ...]
) -> MigrationReport:
    blocked = bool(preflight.blockers(findings))
    return MigrationReport(
        guest=request.guest,
        source=source.name,
        target=request.to,
        outcome=Outcome.BLOCKED if blocked else Outcome.PLANNED,
        driver=None,
        began=Seconds(0.0),
        elapsed=Seconds(0.0),
        totals=None,
        observed_downtime=None,
        warnings=_warnings(findings),
        findings=findings,
    )


def _warnings(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return tuple(f"{f.where}: {f.text}" for f in findings if f.severity is Severity.WARNING)


async def _observed(inventory: Inventory, guest: str, ending: Ending) -> Seconds | None:
    """The blackout that somebody outside saw; None if nobody looked."""
    if inventory.observer is None or ending.outcome is not Outcome.COMPLETED:
        return None
    view = observer_client.LabObserver(inventory.observer)
    return await view.blackout(guest, ending.began, Seconds(ending.began + ending.elapsed))
