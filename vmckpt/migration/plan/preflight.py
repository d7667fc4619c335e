"""Check whether a guest may be moved to a host. Each blocker has a hint. Pure."""

from collections.abc import Iterable, Iterator

from vmckpt.definition.findings import missing, refused
from vmckpt.definition.host_resources import Kind
from vmckpt.migration.plan.facts import Facts
from vmckpt.migration.plan.storage_checks import storage_findings
from vmckpt.model.finding import Finding, Severity, blocker, warning
from vmckpt.model.guest import Guest, GuestState
from vmckpt.model.host import GuestOnHost, HostFacts
from vmckpt.units import MIB, show_bytes

# Memory that QEMU needs in addition to the guest's: video, page tables, device buffers.
_OVERHEAD = 128 * MIB
IN_MAINTENANCE = "host-in-maintenance"
"""Code of the finding about a target in maintenance."""


_START = "run virsh start {name} on {host}"
_RUN = {
    GuestState.PAUSED: "run virsh resume {name} on {host}",
    GuestState.SUSPENDED: "run virsh dompmwakeup {name} on {host}",
    GuestState.SHUTTING_DOWN: "when it is off, run virsh start {name} on {host}",
    # It still has its QEMU process, which does not continue before a reset.
    GuestState.CRASHED: "to restart it, run virsh reset {name} and virsh resume {name} on {host}",
    GuestState.STANDBY: "choose the host where {name} is running with --from",
    GuestState.TEST: "choose the guest itself, not its test copy",
    GuestState.UNKNOWN: "check it with virsh domstate {name} on {host}",
}
"""What to do about a guest that is not running, by its state; `_START` for all other states."""


def check_move(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings, blockers first; only the blockers if `cannot_be` is true."""
    found = [*_hosts(facts)]
    if facts.guest is not None:
        found += _guest(facts, facts.guest)
    if cannot_be(facts):
        return blockers(tuple(found))
    if facts.guest is not None:
        found += storage_findings(facts, facts.guest)
        found += _networks(facts, facts.guest)
        found += _target(facts, facts.guest)
        found += _resources(facts, facts.guest)
        found += _way(facts)
    return ordered(found)


def cannot_be(facts: Facts) -> bool:
    """Return whether the move is impossible: the target is the source, or does not answer.

    Other facts are then missing, so other checks are meaningless.
    """
    return facts.source == facts.target or facts.target_error is not None


def ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, blockers first."""
    order = {Severity.BLOCKER: 0, Severity.WARNING: 1, Severity.INFO: 2, Severity.OK: 3}
    return tuple(sorted(found, key=lambda finding: order[finding.severity]))


def blockers(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings that forbid the migration."""
    return tuple(f for f in findings if f.severity is Severity.BLOCKER)


def _hosts(facts: Facts) -> Iterator[Finding]:
    for host, error in ((facts.source, facts.source_error), (facts.target, facts.target_error)):
        if error is not None:
            yield blocker("host-down", host, error, f"run vmckpt doctor {host}")
    if facts.source == facts.target:
        yield blocker(
            "same-host", facts.name, f"already on {facts.target}", "choose another host with --to"
        )
    elif facts.target_closed is not None:
        yield blocker(
            IN_MAINTENANCE, facts.target, facts.target_closed,
            f"choose another host, or run vmckpt maintenance leave {facts.target}",
        )  # fmt: skip
    elif (
        facts.source_facts is not None
        and facts.target_facts is not None
        and facts.source_facts.uuid == facts.target_facts.uuid
    ):
        yield blocker(
            "same-libvirt",
            facts.target,
            f"{facts.source} and {facts.target} have the same libvirt host UUID,"
            f" {facts.target_facts.uuid}",
            "set host_uuid in /etc/libvirt/libvirtd.conf on one of the hosts and restart libvirtd",
        )
    if facts.guest is None and facts.source_error is None:
        yield blocker(
            "guest-unknown",
            facts.source,
            f"no guest {facts.name!r} on this host",
            "run vmckpt guests",
        )
    for error in facts.ssh_errors:
        yield warning(
            "ssh",
            facts.name,
            error,
            f"run vmckpt doctor {facts.source} {facts.target}; without ssh, some checks are not"
            " made",
        )


def _guest(facts: Facts, guest: Guest) -> Iterator[Finding]:
    # A locked guest may be paused by its job; advising to resume it would then be wrong.
    if not guest.state.runs and not guest.locked:
        yield blocker(
            "guest-not-running",
            guest.name,
            f"is {guest.state.in_words} on {facts.source}",
            _RUN.get(guest.state, _START).format(name=guest.name, host=facts.source),
        )
    if guest.job is not None:
        yield blocker(
            "job-in-progress",
            guest.name,
            f"has a job in progress: {guest.job}",
            "wait until the job ends; if its controller is gone, run vmckpt recover; to abort a"
            f" job that another tool started, run virsh domjobabort {guest.name} or virsh blockjob"
            f" {guest.name} DISK --abort on {facts.source}",
        )
    if guest.snapshots:
        yield blocker(
            "has-snapshots",
            guest.name,
            "libvirt does not migrate guests with snapshots; number of snapshots:"
            f" {guest.snapshots}",
            f"on {facts.source}, run virsh snapshot-list {guest.name}, and delete each snapshot"
            f" with virsh snapshot-delete {guest.name} SNAPSHOT (add --metadata to keep the"
            " overlays of an external snapshot)",
        )
    for device in guest.host_devices:
        yield blocker(
            "host-device",
            guest.name,
            f"uses a device of {facts.source}: {device}",
            f"detach the device with virsh detach-device {guest.name} FILE",
        )
    yield from _unmigratable(facts, guest)
    if guest.cpu_mode in ("host-passthrough", "maximum"):
        yield warning(
            "cpu-passthrough",
            guest.name,
            f"has CPU mode {guest.cpu_mode}: the guest may crash later if {facts.target} has"
            " a different CPU",
            "use CPU mode host-model, or a named CPU model",
        )


def _unmigratable(facts: Facts, guest: Guest) -> Iterator[Finding]:
    """Report why no host can receive the guest, and checkpoints that libvirt does not migrate."""
    for refusal in guest.refusals:
        yield blocker(refusal.code, guest.name, refusal.what, refusal.hint)
    # QEMU's own words are shown only if they say more than the findings above.
    explained = len(guest.host_devices) + sum(one.by_qemu for one in guest.refusals)
    if len(facts.blocked) > explained:
        yield blocker(
            "qemu-blocks", guest.name, f"QEMU cannot migrate the guest: {'; '.join(facts.blocked)}",
            "detach the device, or unmount the shared directory in the guest",
        )  # fmt: skip
    if facts.checkpoints:
        names = ", ".join(one.name for one in facts.checkpoints)
        yield warning(
            "foreign-checkpoints", guest.name,
            f"has checkpoints of another backup tool: {names}; after the move, vmckpt defines them"
            f" again on {facts.target} if their bitmaps are complete",
            "if a checkpoint is lost, begin with a full backup",
        )  # fmt: skip


def _networks(facts: Facts, guest: Guest) -> Iterator[Finding]:
    for source in sorted({nic.source or "" for nic in guest.nics if nic.kind == "network"}):
        if facts.target_facts is not None and source not in facts.target_facts.networks:
            yield blocker(
                "network-missing",
                facts.target,
                f"no active libvirt network {source!r}",
                f"if {facts.target} has no definition of it, save the output of virsh net-dumpxml"
                f" {source} on {facts.source} and run virsh net-define FILE on {facts.target};"
                f" then run virsh net-start {source} on {facts.target}",
            )
    for source in sorted(
        {nic.source or "" for nic in guest.nics if nic.kind in ("bridge", "direct")}
    ):
        if facts.target_links is None:
            yield warning(
                "network-unproven",
                facts.target,
                f"could not check for bridge or interface {source!r}",
            )
        elif source not in facts.target_links:
            yield blocker(
                "network-missing",
                facts.target,
                f"no bridge or interface {source!r}",
                f"create the bridge or interface there; {guest.name} needs it",
            )


def _uuid_taken(facts: Facts, guest: Guest, other: GuestOnHost) -> Finding:
    hint = f"find out which guest is correct, then run virsh undefine {other.name} there"
    if other.state.is_active:  # only the definition of an active guest can be removed
        hint = (
            f"find out which guest is correct, then run virsh undefine {other.name} and virsh"
            f" destroy {other.name} there"
        )
    if other.state is GuestState.PAUSED:  # as libvirt shows a standby
        hint = (
            f"run vmckpt status {guest.name} to see whether that guest is its standby; if not,"
            f" {hint}"
        )
    return blocker(
        "uuid-taken",
        facts.target,
        f"guest {other.name!r} has the same UUID {guest.uuid} and is {other.state.in_words}",
        hint,
    )


def _name_taken(facts: Facts, guest: Guest, other: GuestOnHost) -> Finding:
    hint = f"rename the other guest: virsh domrename {guest.name} NEW on {facts.target}"
    if other.state.is_active:  # libvirt renames no active guest
        hint = (
            f"shut down and rename the other guest: run virsh shutdown {guest.name}, and when it is"
            f" off, virsh domrename {guest.name} NEW on {facts.target}"
        )
    return blocker(
        "name-taken",
        facts.target,
        f"another guest is named {guest.name!r} there (UUID {other.uuid})",
        hint,
    )


def _target(facts: Facts, guest: Guest) -> Iterator[Finding]:
    target = facts.target_facts
    if target is None or facts.source == facts.target:
        return
    for other in target.guests:
        same = (other.name == guest.name, other.uuid == guest.uuid)
        if same == (True, True) and not other.state.is_active:
            yield warning(
                "definition-replaced",
                facts.target,
                f"an inactive {guest.name} is defined there; its definition will be replaced",
            )
        elif same == (True, True) and guest.leaves:
            continue  # the target's end of the guest's own migration
        elif same[1]:
            yield _uuid_taken(facts, guest, other)
        elif same[0]:
            yield _name_taken(facts, guest, other)
    yield from _platform(facts, guest, target)
    if facts.cpu_fits is False:
        yield blocker(
            "cpu-model",
            facts.target,
            f"does not support the CPU of {guest.name}",
            "to find a CPU model that both hosts support, save the output of virsh"
            f" domcapabilities on {facts.source} and on {facts.target} to one FILE and run virsh"
            " hypervisor-cpu-baseline FILE",
        )
    yield from _memory(facts, guest, target)


def _platform(facts: Facts, guest: Guest, target: HostFacts) -> Iterator[Finding]:
    """Check that the target has the guest's architecture, accelerator and machine type."""
    if target.platforms and guest.arch and guest.arch not in {arch for arch, _ in target.platforms}:
        yield blocker(
            "architecture", facts.target, f"QEMU there cannot run {guest.arch} guests",
            f"choose a host for {guest.arch} guests with --to",
        )  # fmt: skip
    elif not target.runs(guest.arch, guest.accelerator):
        yield blocker(
            "accelerator",
            facts.target,
            f"does not support {guest.accelerator!r} for {guest.arch or 'this'} guests",
            f"choose another host, or run vmckpt doctor {facts.target}",
        )
    elif guest.machine not in target.machines_of(guest.arch, guest.accelerator):
        yield blocker(
            "machine-type",
            facts.target,
            f"QEMU {target.qemu_version} there has no machine type {guest.machine}",
            "upgrade QEMU there, or restart the guest with an older machine type",
        )


def _memory(facts: Facts, guest: Guest, target: HostFacts) -> Iterator[Finding]:
    needed = guest.memory + _OVERHEAD
    if guest.huge_pages:
        if not any(one.kind is Kind.HUGE_PAGES for one in facts.answers):
            yield warning(
                "huge-pages",
                facts.target,
                f"{guest.name} needs {show_bytes(guest.memory)} of huge pages there; their"
                " availability was not checked",
                f"run virsh freepages --all on {facts.target}",
            )
    elif needed > target.memory_free:
        yield blocker(
            "memory-room",
            facts.target,
            f"{show_bytes(needed)} of memory needed, {show_bytes(target.memory_free)} free",
            "free up memory there, or choose another host",
        )


def _resources(facts: Facts, guest: Guest) -> Iterator[Finding]:
    """Report what the guest's definition needs and the target lacks."""
    lacking = missing(
        facts.needs, facts.answers, guest=guest.name, source=facts.source, target=facts.target
    )
    yield from lacking
    # libvirt reports only its first reason, which one of the findings above usually explains.
    if facts.refused is not None and not blockers(lacking):
        yield refused(facts.refused, guest=guest.name, target=facts.target)


def _way(facts: Facts) -> Iterator[Finding]:
    if facts.peer_login_error is not None:
        yield warning(
            "client-driven",
            facts.source,
            f"cannot log in to {facts.target}'s libvirtd ({facts.peer_login_error}): this command"
            " will drive the migration, which fails if this command dies",
            f"run vmckpt doctor {facts.source}",
        )
