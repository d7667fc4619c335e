"""Make the plan of a migration: everything that is determined and decided before it starts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from vmckpt.errors import BadInput, HypervisorError, RemoteError
from vmckpt.hypervisor import same_host as same_hosts
from vmckpt.hypervisor import storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal.migration_history import PastMove
from vmckpt.migration import request
from vmckpt.migration.forecast import service as services
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.forecast.measure import Links
from vmckpt.migration.forecast.service import GuestForecast
from vmckpt.migration.plan import preflight, storage_checks, storage_copy, tls_checks
from vmckpt.migration.plan.facts import Facts
from vmckpt.migration.plan.host_facts import Remotes, gather
from vmckpt.migration.plan.tls_checks import TlsVerdict
from vmckpt.migration.request import PolicyOverrides
from vmckpt.migration.run.progress import UNKNOWN
from vmckpt.model import known_problems, same_host
from vmckpt.model.disk import CopyPlan
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import ADD_SSH_TO_BOTH, QemuCertificates
from vmckpt.model.migration import Driver, Mode, MoveOrder
from vmckpt.policy import compatibility, select
from vmckpt.policy.compatibility import Conflict, Versions
from vmckpt.policy.model import CopyKind, Policy, Tls
from vmckpt.policy.select import Chosen, Subject
from vmckpt.remote import probe as remote_probe
from vmckpt.remote.ssh import Remote
from vmckpt.units import Bytes, Seconds

NO_COPIES = CopyPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a migration would do, and all findings about it."""

    facts: Facts
    findings: tuple[Finding, ...]
    chosen: Chosen | None = None
    """The choice of a policy; None if the guest was not found. The fields below are then unset,
    too."""
    policy: Policy | None = None
    """The chosen policy with the operator's overrides applied."""
    mode: Mode = Mode.PRECOPY
    reason: str = ""
    """Why this mode was chosen."""
    post_copy: bool = False
    """Whether the policy, the guest and both hosts permit post-copy."""
    tls_name: str | None = None
    copies: CopyPlan = NO_COPIES
    outlook: GuestForecast | None = None
    """Measurements and forecasts; None if nothing was measured."""

    @property
    def curve(self) -> DirtyCurve:
        """The guest's dirtying curve, as far as it was measured."""
        return UNKNOWN if self.outlook is None else self.outlook.curve

    @property
    def blocked(self) -> bool:
        return self.facts.guest is None or bool(self.blockers)

    @property
    def blockers(self) -> tuple[Finding, ...]:
        return preflight.blockers(self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """Options of the forecast."""

    past: Callable[[], Awaitable[Sequence[PastMove]]]
    """Returns past moves between these hosts, from the journal, latest first."""
    probe: Seconds | None = None
    """How long the guest's writes may be measured; None: as set in the policy, and not at all if
    the policy's mode leaves nothing to decide."""
    every_mode: bool = False
    """Also forecast the modes that the policy does not use."""
    closed_too: bool = False
    """Make a forecast even if the target is in maintenance."""
    links: Links | None = None
    """Link measurements shared with other plans; None: links are measured for this plan."""


_SETTLED = (Mode.POSTCOPY, Mode.STOP_AND_COPY)
"""Modes during which nothing is decided, so that a forecast could change nothing."""


def probe_of(policy: Policy, ahead: ForecastOptions) -> Seconds:
    """Return how long the guest's writes may be measured; 0: no forecast is needed. Pure."""
    if ahead.probe is not None:
        return ahead.probe
    return Seconds(0.0) if policy.mode in _SETTLED and not ahead.every_mode else policy.probe


async def _look_ahead(
    ahead: ForecastOptions,
    hosts: tuple[Hypervisor, Hypervisor],
    guest: Guest,
    policy: Policy,
    *,
    remotes: Remotes | None,
    post_copy: bool,
    disks: Bytes,
) -> GuestForecast | None:
    probe = probe_of(policy, ahead)
    if probe <= 0:
        return None
    return await services.forecast_guest(
        hosts,
        guest,
        policy,
        past=await ahead.past(),
        probe=probe,
        remotes=remotes,
        post_copy=post_copy,
        every_mode=ahead.every_mode,
        links=ahead.links,
        disks=disks,
    )


async def make(
    source: Hypervisor,
    target: Hypervisor,
    name: str,
    *,
    policies: Sequence[Policy],
    forced: str | None,
    overrides: PolicyOverrides,
    remotes: Remotes | None,
    ahead: ForecastOptions | None,
) -> Plan:
    """Query both hosts and make the plan. A query that fails becomes a finding.

    `forced`: the policy that the operator requested; None: `select` chooses a policy. `ahead`:
    options of the forecast; None: no forecast.

    Raises InventoryError if source and target are, or may be, one host with two names; PolicyError
    if no policy can be chosen; BadInput if disks are to be copied and the storage pool cannot be
    used, or a host has no ssh login; HostKeyRefused.
    """
    facts, tls_facts = await asyncio.gather(
        gather(source, target, name, remotes), _certificates(remotes)
    )
    await _require_two_hosts(facts, source, target)
    if facts.guest is None:
        return Plan(facts=facts, findings=preflight.check_move(facts))
    chosen = select.choose(policies, _subject(facts.guest, source), forced)
    policy = request.apply_overrides(chosen.policy, overrides)
    if preflight.cannot_be(facts):
        return Plan(facts=facts, findings=preflight.check_move(facts), chosen=chosen, policy=policy)
    by_epochs = policy.mode is Mode.CHECKPOINT
    tls = None if by_epochs else _tls(policy, source, target, tls_facts)
    copies = await _copies(policy, facts, source, target, remotes)
    facts = replace(facts, copied=frozenset(copies.left_behind))
    found = () if by_epochs else conflicts(policy, facts, copies)
    post_copy = _post_copy(policy, facts, found)
    findings = (
        *preflight.check_move(facts),
        *_as_findings(found, facts.guest.name if facts.guest is not None else name),
        *_why_no_post_copy(policy, facts),
        *(tls.findings if tls is not None else ()),
        *copies.findings,
        *_known_problems(facts, tls, copies, post_copy=post_copy),
    )
    outlook = None
    if by_epochs:
        # Imported here: only this mode needs it.
        from vmckpt.migration.epochs import request as epochs_request  # noqa: PLC0415

        findings = await epochs_request.findings(findings, policy, facts, copies, (source, target))
        ahead = None  # there are no passes to forecast
    passed = {preflight.IN_MAINTENANCE} if ahead is not None and ahead.closed_too else set()
    against = [one for one in preflight.blockers(findings) if one.code not in passed]
    if ahead is not None and facts.guest is not None and not against:
        outlook = await _look_ahead(
            ahead,
            (source, target),
            facts.guest,
            _as_it_travels(policy, tls),
            remotes=remotes,
            post_copy=post_copy,
            disks=copies.travels,
        )
    mode, reason = services.mode_of(policy, outlook, post_copy=post_copy)
    return Plan(
        facts=facts,
        findings=preflight.ordered(findings),
        chosen=chosen,
        policy=policy,
        mode=mode,
        reason=reason,
        outlook=outlook,
        post_copy=post_copy,
        tls_name=tls.name if tls is not None else None,
        copies=copies,
    )


async def _require_two_hosts(facts: Facts, source: Hypervisor, target: Hypervisor) -> None:
    """Check that source and target are not one host with two names. Raises InventoryError."""
    here, there = facts.source_facts, facts.target_facts
    if here is None or there is None or here.uuid != there.uuid or facts.source == facts.target:
        return
    same_host.require_distinct(await same_hosts.among((source, target)))


def _known_problems(
    facts: Facts, tls: TlsVerdict | None, copies: CopyPlan, *, post_copy: bool
) -> Iterator[Finding]:
    here, there = facts.source_facts, facts.target_facts
    if facts.guest is not None and here is not None and there is not None:
        yield from known_problems.of_move(
            facts.guest, here, there, encrypted=tls is not None and tls.name is not None,
            post_copy=post_copy, travels=copies.travels,
        )  # fmt: skip


def _as_it_travels(policy: Policy, tls: TlsVerdict | None) -> Policy:
    """Return the policy with `tls: preferred` resolved, since an encrypted stream is slower."""
    encrypted = tls is not None and tls.name is not None
    how = replace(policy.transport, tls=Tls.REQUIRED if encrypted else Tls.OFF)
    return replace(policy, transport=how)


def _subject(guest: Guest, source: Hypervisor) -> Subject:
    return Subject(
        guest=guest.name,
        guest_labels=guest.labels,
        host_labels=source.host.labels,
        memory=guest.memory,
    )


TlsFacts = tuple[QemuCertificates | None, QemuCertificates | None]


async def _certificates(remotes: Remotes | None) -> TlsFacts:
    async def one(host: Remote) -> QemuCertificates | None:
        try:
            return await remote_probe.look_at_certificates(host)
        except RemoteError:
            return None

    if remotes is None:
        return None, None
    here, there = await asyncio.gather(*(one(host) for host in remotes))
    return here, there


def _tls(
    policy: Policy, source: Hypervisor, target: Hypervisor, facts: TlsFacts
) -> TlsVerdict | None:
    """Check TLS between the hosts. Returns None if the policy turns encryption off."""
    wanted = policy.transport.tls
    if wanted is Tls.OFF:
        return None
    if wanted is Tls.PREFERRED and None in facts:
        text = "the stream is not encrypted: the hosts' certificates could not be read"
        return TlsVerdict(name=None, findings=(_plain(target.host.name, text, Severity.WARNING),))
    verdict = tls_checks.tls_findings(
        source=source.host.name,
        target=target.host.name,
        at_source=facts[0],
        at_target=facts[1],
        names=tls_checks.names_of(target.host, facts[1].hostname if facts[1] is not None else None),
        now=datetime.now(UTC),
    )
    if wanted is Tls.REQUIRED:
        return verdict
    # With `preferred`, problems do not block the migration. Many hosts have no certificates;
    # certificates that do not work are worth a warning.
    none = all(one is not None and not one.present for one in facts)
    softer = tuple(
        _plain(one.where, one.text, Severity.INFO if none else Severity.WARNING)
        if one.severity is Severity.BLOCKER
        else one
        for one in verdict.findings
    )
    return TlsVerdict(name=verdict.name, findings=softer)


def _plain(where: str, text: str, severity: Severity) -> Finding:
    hint = "see libvirt's TLS guide (kbase/tlscerts), or use --tls off"
    return Finding(code="not-encrypted", severity=severity, where=where, text=text, hint=hint)


async def _copies(
    policy: Policy,
    facts: Facts,
    source: Hypervisor,
    target: Hypervisor,
    remotes: Remotes | None,
) -> CopyPlan:
    wish, guest = policy.storage, facts.guest
    if wish.copy is CopyKind.SHARED or guest is None or facts.target_facts is None:
        return NO_COPIES
    if remotes is None:
        raise BadInput(
            f"{guest.name}: disks can only be copied between hosts with ssh logins",
            hint=ADD_SSH_TO_BOTH,
        )
    try:
        return await storage_copy.plan_copies(
            *remotes,
            await storage.drives(source, guest.uuid),
            facts.same_file,
            await storage_copy.wish_of(wish, target),
            # Epochs write complete images.
            chains={} if policy.mode is Mode.CHECKPOINT else {
                disk.target: disk.below for disk in guest.disks
            },
        )  # fmt: skip
    except (RemoteError, HypervisorError) as exc:
        found = Finding(
            code="disks-not-seen",
            severity=Severity.BLOCKER,
            where=guest.name,
            text=f"the guest's disks could not be examined: {exc.message}",
            hint=f"run vmckpt doctor {source.host.name} {target.host.name}",
        )
        return CopyPlan(findings=(found,), rest_shared=False)


def conflicts(policy: Policy, facts: Facts, copies: CopyPlan) -> tuple[Conflict, ...]:
    """Return the demands of the policy that these hosts cannot meet for this guest.

    Empty if the guest or the facts about a host are unknown.
    """
    guest, here, there = facts.guest, facts.source_facts, facts.target_facts
    if guest is None or here is None or there is None:
        return ()
    return compatibility.conflicts(
        policy,
        source=Versions(qemu=here.qemu_version, libvirt=here.libvirt_version),
        target=Versions(qemu=there.qemu_version, libvirt=there.libvirt_version),
        host_devices=bool(guest.host_devices),
        copied_disks=bool(copies.copies),
        huge_pages=guest.huge_pages,
        file_backed_memory=guest.file_memory and facts.memory_folder != "tmpfs",
    )


# Optional conflicts that do not prevent post-copy itself, only an additional feature.
_STILL_POSSIBLE = (
    "post-copy-with-huge-pages",
    "recovery-needs-newer-libvirt",
    "stopped-while-disks-are-copied",
)


def _post_copy(policy: Policy, facts: Facts, found: Sequence[Conflict]) -> bool:
    """Return whether the guest may be switched to post-copy between these hosts."""
    if not policy.may_switch_early or facts.post_copy_error is not None:
        return False
    if not facts.post_copy_asked and policy.mode is not Mode.POSTCOPY:
        return False
    return all(one.code in _STILL_POSSIBLE for one in found if one.optional)


def _why_no_post_copy(policy: Policy, facts: Facts) -> tuple[Finding, ...]:
    if not policy.may_switch_early:
        return ()
    if not facts.post_copy_asked and facts.target_error is None:
        text = "it is unknown whether this host can receive guests in post-copy"
        what = (
            "post-copy is tried anyway" if policy.mode is Mode.POSTCOPY else "post-copy is not used"
        )
        return (
            Finding(
                code="post-copy-unproven",
                severity=Severity.WARNING,
                where=facts.target,
                text=f"{text}: {what}",
                hint=ADD_SSH_TO_BOTH,
            ),
        )
    if facts.post_copy_error is None:
        return ()
    must = policy.mode is Mode.POSTCOPY
    return (
        Finding(
            code="post-copy-refused",
            severity=Severity.BLOCKER if must else Severity.INFO,
            where=facts.target,
            text=f"cannot receive guests in post-copy: {facts.post_copy_error}",
            hint="run sysctl -w vm.unprivileged_userfaultfd=1 there",
        ),
    )


def _as_findings(found: Sequence[Conflict], guest: str) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            code=one.code,
            severity=Severity.INFO if one.optional else Severity.BLOCKER,
            where=guest,
            text=one.text,
            hint=one.hint,
        )
        for one in found
    )


async def order(plan: Plan, source: Hypervisor) -> MoveOrder:
    """Return the migration order to pass to libvirt. The plan must not be blocked.

    Raises HypervisorError if disks are copied and the guest's definition cannot be read.
    """
    assert plan.policy is not None
    assert plan.facts.guest is not None
    guest = plan.facts.guest
    made = request.order(
        plan.policy,
        plan.mode,
        guest,
        driver=Driver.CLIENT if plan.facts.peer_login_error else Driver.PEER_TO_PEER,
        storage_proven=plan.copies.rest_shared
        if plan.copies.copies
        else storage_checks.storage_proven(plan.facts),
        tls_name=plan.tls_name,
    )
    if not plan.copies.copies:
        return made
    running, stored = await storage.definitions_with_images_at(
        source, guest.uuid, plan.copies.placed
    )
    return replace(
        made,
        copied_disks=plan.copies.disks,
        shallow=plan.copies.shallow,
        target_xml=running,
        target_definition=stored,
    )
