"""Check whether a guest may be moved to a host. Each blocker has a hint. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vmckpt.capture.device_limits import DISKS_OUTSIDE
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Disk, Guest, GuestState
from vmckpt.model.host import GuestOnHost, HostFacts
from vmckpt.units import MIB, show_bytes

# Memory that QEMU needs in addition to the guest's: video, page tables, device buffers.
_OVERHEAD = 128 * MIB
# First major version of QEMU in which TCG tracks every write during a migration.
_TCG_NOTES_WRITES = 9
LIBVIRT_DECIDES = "; libvirt decides whether to migrate the guest"
"""End of the text of a finding "storage-unproven"."""
IN_MAINTENANCE = "host-in-maintenance"
"""Code of the finding about a target in maintenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that preflight checks."""

    name: str
    """The guest, as the operator named it."""
    source: str
    target: str
    guest: Guest | None = None
    """The guest; None if it was not found on any host that answered."""
    source_facts: HostFacts | None = None
    source_error: str | None = None
    target_facts: HostFacts | None = None
    target_error: str | None = None
    target_links: frozenset[str] | None = None
    """Bridges and interfaces of the target; None if unknown."""
    same_file: Mapping[str, bool] = field(default_factory=dict)
    """Whether both hosts see the same file, by path of a disk's file; absent if unknown."""
    on_target: Mapping[str, bool] = field(default_factory=dict)
    """Whether a required file exists on the target, by path; absent if unknown."""
    copied: frozenset[str] = frozenset()
    """Files of disks that are copied, which need not be the same on both hosts."""
    cpu_fits: bool | None = None
    peer_login_error: str | None = None
    post_copy_error: str | None = None
    """Why the target cannot receive a guest in post-copy; None if it can."""
    post_copy_asked: bool = True
    """Whether the target's support for post-copy could be queried."""
    memory_folder: str | None = None
    """File system of the target's directory for memory files: "tmpfs", …; None if unknown."""
    ssh_errors: tuple[str, ...] = ()
    target_closed: str | None = None
    """Why no guest may be placed on the target; None if guests may be placed there."""


def check_move(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings, blockers first; only the blockers if `cannot_be` is true."""
    found = [*_hosts(facts)]
    if facts.guest is not None:
        found += _guest(facts, facts.guest)
    if cannot_be(facts):
        return blockers(tuple(found))
    if facts.guest is not None:
        found += _emulated(facts, facts.guest)
        found += _storage(facts, facts.guest)
        found += _networks(facts, facts.guest)
        found += _target(facts, facts.guest)
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


_MAY_BE_EMPTY = ("file", "block")
"""Types of drives that have no source while they are empty."""


def storage_proven(facts: Facts) -> bool:
    """Return whether every writable disk is confirmed to be the same on both hosts."""
    if facts.guest is None:
        return False
    written = [
        disk for disk in facts.guest.disks
        if not disk.read_only and (disk.source or disk.kind not in _MAY_BE_EMPTY)
    ]  # fmt: skip
    return all(
        (disk.kind == "network" or _same(facts, disk) is True)
        and not disk.on_device
        and all(facts.same_file.get(path) is True for path in disk.below)
        for disk in written
    )


def _same(facts: Facts, disk: Disk) -> bool | None:
    """Return whether both hosts see the same file; None if unknown."""
    return facts.same_file.get(disk.source or "") if disk.kind == "file" else None


def _finding(code: str, severity: Severity, where: str, text: str, hint: str | None) -> Finding:
    return Finding(code=code, severity=severity, where=where, text=text, hint=hint)


def _blocker(code: str, where: str, text: str, hint: str) -> Finding:
    return _finding(code, Severity.BLOCKER, where, text, hint)


def _warning(code: str, where: str, text: str, hint: str | None = None) -> Finding:
    return _finding(code, Severity.WARNING, where, text, hint)


def _hosts(facts: Facts) -> Iterator[Finding]:
    for host, error in ((facts.source, facts.source_error), (facts.target, facts.target_error)):
        if error is not None:
            yield _blocker("host-down", host, error, f"run vmckpt doctor {host}")
    if facts.source == facts.target:
        yield _blocker(
            "same-host", facts.name, f"already on {facts.target}", "choose another host with --to"
        )
    elif facts.target_closed is not None:
        yield _blocker(
            IN_MAINTENANCE, facts.target, facts.target_closed,
            f"choose another host, or run vmckpt maintenance leave {facts.target}",
        )  # fmt: skip
    elif (
        facts.source_facts is not None
        and facts.target_facts is not None
        and facts.source_facts.uuid == facts.target_facts.uuid
    ):
        yield _blocker(
            "same-libvirt",
            facts.target,
            f"{facts.source} and {facts.target} have the same libvirt host UUID,"
            f" {facts.target_facts.uuid}",
            "set host_uuid in /etc/libvirt/libvirtd.conf on one of the hosts and restart libvirtd",
        )
    if facts.guest is None and facts.source_error is None:
        yield _blocker(
            "guest-unknown",
            facts.source,
            f"no guest {facts.name!r} on this host",
            "run vmckpt guests",
        )
    for error in facts.ssh_errors:
        yield _warning(
            "ssh",
            facts.name,
            error,
            f"run vmckpt doctor {facts.source} {facts.target}; without ssh, some checks are not"
            " made",
        )


def _guest(facts: Facts, guest: Guest) -> Iterator[Finding]:
    # A locked guest may be paused by its job; advising to resume it would then be wrong.
    if not guest.state.runs and not guest.locked:
        verb = "resume" if guest.state is GuestState.PAUSED else "start"
        yield _blocker(
            "guest-not-running",
            guest.name,
            f"is {guest.state.in_words} on {facts.source}",
            f"run virsh {verb} {guest.name} on {facts.source}",
        )
    if guest.job is not None:
        yield _blocker(
            "job-in-progress",
            guest.name,
            f"has a job in progress: {guest.job}",
            "wait until the job ends; if its controller is gone, run vmckpt recover; to abort a"
            f" job that another tool started, run virsh domjobabort {guest.name} or virsh blockjob"
            f" {guest.name} DISK --abort on {facts.source}",
        )
    if guest.snapshots:
        yield _blocker(
            "has-snapshots",
            guest.name,
            "libvirt does not migrate guests with snapshots; number of snapshots:"
            f" {guest.snapshots}",
            f"delete each snapshot with virsh snapshot-delete {guest.name} SNAPSHOT",
        )
    for device in guest.host_devices:
        yield _blocker(
            "host-device",
            guest.name,
            f"uses a device of {facts.source}: {device}",
            f"detach the device with virsh detach-device {guest.name} FILE",
        )
    if guest.cpu_mode in ("host-passthrough", "maximum"):
        yield _warning(
            "cpu-passthrough",
            guest.name,
            f"has CPU mode {guest.cpu_mode}: the guest may crash later if {facts.target} has"
            " a different CPU",
            "use CPU mode host-model, or a named CPU model",
        )


def _emulated(facts: Facts, guest: Guest) -> Iterator[Finding]:
    """Warn about TCG in QEMU before 9.0, which does not track every write.

    See docs/adr/0005-tcg-lost-writes.md.
    """
    source = facts.source_facts
    if source is None or guest.accelerator != "qemu" or "pti=on" in guest.kernel_arguments.split():
        return
    if int(source.qemu_version.split(".")[0]) < _TCG_NOTES_WRITES:
        yield _warning(
            "tcg-lost-writes",
            guest.name,
            f"runs under TCG, and QEMU {source.qemu_version} on its host loses writes of TCG"
            " guests during a long pre-copy: the guest may crash after the move",
            "boot the guest with pti=on, use KVM, or upgrade to QEMU 9.0 or newer",
        )


def _storage(facts: Facts, guest: Guest) -> Iterator[Finding]:
    for disk in guest.disks:
        if disk.kind in DISKS_OUTSIDE:
            yield _blocker(
                "storage-not-visible", facts.target,
                f"disk {disk.target} of {guest.name} ({disk.kind}) is a device of {facts.source}",
                "detach the disk first, or use an image that both hosts can access",
            )  # fmt: skip
        elif disk.source is not None:
            yield from _disk(facts, guest, disk)
    for path in guest.boot_files:
        if facts.on_target.get(path) is False:
            yield _blocker(
                "file-missing",
                facts.target,
                f"{path}, a boot file of {guest.name}, is missing",
                f"copy the file from {facts.source}",
            )


def _disk(facts: Facts, guest: Guest, disk: Disk) -> Iterator[Finding]:
    what = f"disk {disk.target} of {guest.name} ({disk.source})"
    if disk.cache == "unsafe" and not disk.read_only:
        yield _blocker(
            "cache-mode",
            guest.name,
            f"{what} has cache=unsafe: written data may exist only in {facts.source}'s memory",
            "set cache='none' and restart the guest",
        )
    same = _same(facts, disk)
    if disk.source in facts.copied:
        return
    yield from _below(facts, disk, what)
    if facts.on_target.get(disk.source or "") is False:
        yield _blocker(
            "storage-not-visible",
            facts.target,
            f"{what} is missing",
            f"share its directory between {facts.source} and {facts.target},"
            " or use --copy-storage thin",
        )
    elif same is False and not disk.read_only:
        yield _blocker(
            "storage-not-visible",
            facts.target,
            f"{what} is not the same file on both hosts",
            f"share its directory between {facts.source} and {facts.target},"
            " or use --copy-storage thin",
        )
    elif same is None and disk.kind != "network" and not disk.read_only:
        yield _warning(
            "storage-unproven",
            guest.name,
            f"{what} is not confirmed to be the same file on both hosts{LIBVIRT_DECIDES}",
            "in the inventory, add ssh logins that can write to the disk's directory",
        )


def _below(facts: Facts, disk: Disk, what: str) -> Iterator[Finding]:
    """Check the backing images of a disk."""
    for path in disk.below:
        if facts.on_target.get(path) is False:
            yield _blocker(
                "storage-not-visible", facts.target,
                f"{path}, a backing image of {what}, is missing",
                f"share its directory between {facts.source} and {facts.target}",
            )  # fmt: skip
        elif facts.same_file.get(path) is False:
            yield _warning(
                "storage-backing", facts.target,
                f"{path}, a backing image of {what}, is a different file there: both files must"
                " have the same data",
                "compare the two files, or share the directory between"
                f" {facts.source} and {facts.target}",
            )  # fmt: skip


def _networks(facts: Facts, guest: Guest) -> Iterator[Finding]:
    for source in sorted({nic.source or "" for nic in guest.nics if nic.kind == "network"}):
        if facts.target_facts is not None and source not in facts.target_facts.networks:
            yield _blocker(
                "network-missing",
                facts.target,
                f"no active libvirt network {source!r}",
                f"run virsh net-start {source} there",
            )
    for source in sorted(
        {nic.source or "" for nic in guest.nics if nic.kind in ("bridge", "direct")}
    ):
        if facts.target_links is None:
            yield _warning(
                "network-unproven",
                facts.target,
                f"could not check for bridge or interface {source!r}",
            )
        elif source not in facts.target_links:
            yield _blocker(
                "network-missing",
                facts.target,
                f"no bridge or interface {source!r}",
                f"create the bridge or interface there; {guest.name} needs it",
            )


def _uuid_taken(facts: Facts, guest: Guest, other: GuestOnHost) -> Finding:
    hint = f"find out which guest is correct, then run virsh undefine {other.name} there"
    if other.state is GuestState.PAUSED:  # as libvirt shows a standby
        hint = (
            f"run vmckpt status {guest.name} to see whether that guest is its standby; if not,"
            f" {hint}"
        )
    return _blocker(
        "uuid-taken",
        facts.target,
        f"guest {other.name!r} has the same UUID {guest.uuid} and is {other.state.in_words}",
        hint,
    )


def _target(facts: Facts, guest: Guest) -> Iterator[Finding]:
    target = facts.target_facts
    if target is None or facts.source == facts.target:
        return
    for other in target.guests:
        same = (other.name == guest.name, other.uuid == guest.uuid)
        if same == (True, True) and not other.state.is_active:
            yield _warning(
                "definition-replaced",
                facts.target,
                f"an inactive {guest.name} is defined there; its definition will be replaced",
            )
        elif same == (True, True) and guest.leaves:
            continue  # the target's end of the guest's own migration
        elif same[1]:
            yield _uuid_taken(facts, guest, other)
        elif same[0]:
            yield _blocker(
                "name-taken",
                facts.target,
                f"another guest is named {guest.name!r} there (UUID {other.uuid})",
                f"rename the other guest: virsh domrename {guest.name} NEW on {facts.target}",
            )
    if guest.accelerator not in target.accelerators:
        yield _blocker(
            "accelerator",
            facts.target,
            f"does not support {guest.accelerator!r}",
            f"run vmckpt doctor {facts.target}",
        )
    if guest.machine not in target.machines:
        yield _blocker(
            "machine-type",
            facts.target,
            f"QEMU {target.qemu_version} there has no machine type {guest.machine}",
            "upgrade QEMU there, or restart the guest with an older machine type",
        )
    if facts.cpu_fits is False:
        yield _blocker(
            "cpu-model",
            facts.target,
            f"does not support the CPU of {guest.name}",
            "to find a CPU model that both hosts support, run virsh hypervisor-cpu-baseline",
        )
    yield from _memory(facts, guest, target)


def _memory(facts: Facts, guest: Guest, target: HostFacts) -> Iterator[Finding]:
    needed = guest.memory + _OVERHEAD
    if guest.huge_pages:
        yield _warning(
            "huge-pages",
            facts.target,
            f"{guest.name} needs {show_bytes(guest.memory)} of huge pages there; their availability"
            " was not checked",
            f"run virsh freepages --all on {facts.target}",
        )
    elif needed > target.memory_free:
        yield _blocker(
            "memory-room",
            facts.target,
            f"{show_bytes(needed)} of memory needed, {show_bytes(target.memory_free)} free",
            "free up memory there, or choose another host",
        )


def _way(facts: Facts) -> Iterator[Finding]:
    if facts.peer_login_error is not None:
        yield _warning(
            "client-driven",
            facts.source,
            f"cannot log in to {facts.target}'s libvirtd ({facts.peer_login_error}): this command"
            " will drive the migration, which fails if this command dies",
            f"run vmckpt doctor {facts.source}",
        )
