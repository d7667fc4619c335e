"""Findings about hosts and the controller, for migrations and snapshots, with hints. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509

from vmckpt.model import known_problems
from vmckpt.model.fencing import Power, Ran, power
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.host import (
    ADD_SSH,
    TRACKS_WRITES,
    Host,
    HostFacts,
    HostProbe,
    NoTrace,
    SshAddress,
)
from vmckpt.model.same_host import SameUuid
from vmckpt.replication.watchdog import rules
from vmckpt.replication.watchdog.rules import KillMethod
from vmckpt.units import MIB, Bytes, show_bytes, show_count, show_seconds

OLDEST_LIBVIRT = (9, 0, 0)
OLDEST_QEMU = (7, 2, 0)
# libvirt's default range for incoming migrations, migration_port_min in qemu.conf.
FIRST_PORT = 49152
# Seconds. The final statistics of a migration compare the clocks of both hosts, and a downtime
# lasts only milliseconds.
_SKEW = 0.1
_EXPIRES_SOON = timedelta(days=30)
_NEEDED = {
    "/etc/pki/CA/cacert.pem": "libvirt over TLS",
    "/etc/pki/libvirt/servercert.pem": "libvirt over TLS",
    "/etc/pki/libvirt/clientcert.pem": "peer-to-peer migration over TLS",
    "/etc/pki/qemu/server-cert.pem": "encrypted migration streams",
}
_WATCHDOGS = {
    KillMethod.KERNEL: Severity.OK,
    KillMethod.UNIT: Severity.INFO,
    # A pair of watchdog processes does not survive if both are killed at the same time.
    KillMethod.PAIR: Severity.WARNING,
}
_TRACES = {
    NoTrace.PROCESSOR: "use systemd on the host: it restarts a watchdog that is killed",
    NoTrace.YAMA: "set kernel.yama.ptrace_scope = 1 in /etc/sysctl.d, then reboot the host",
    NoTrace.SELINUX: "run setsebool -P deny_ptrace off on the host",
    NoTrace.CAPABILITY: "log in by ssh as root, which protections require",
}


_UNTESTED = "; this is untested on arm64"
_TRY = "test it: protect a guest, then run vmckpt failover GUEST --test"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen:
    """The result of a status query to one fence device of a host."""

    name: str
    """The display name; see `FenceTopology.name`."""
    agent: str
    level: int
    ran: Ran | None = None
    error: str | None = None
    """Why the fence agent was not run."""
    hint: str | None = None
    """What to do about `error`."""

    @property
    def power(self) -> Power:
        """The power state that the device reports; unknown if its agent was not run."""
        return Power.UNKNOWN if self.ran is None else power(self.ran)


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceSeen:
    """The results of status queries to all fence devices of a host."""

    devices: tuple[DeviceSeen, ...]
    too_open: tuple[str, ...] = ()
    """Password files that other users may read."""

    def all_off(self, level: int) -> bool:
        """Return whether all devices of a level report that the power is off."""
        return all(one.power is Power.OFF for one in self.devices if one.level == level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """All facts collected about one host."""

    host: Host
    facts: HostFacts | None = None
    facts_error: str | None = None
    probe: HostProbe | None = None
    probe_error: str | None = None
    probe_hint: str | None = None
    kvm_boots: bool | None = None
    logins: Mapping[str, str | None] = field(default_factory=dict)
    """For each other host, by name: why this host cannot log in to that host's libvirtd; None: it
    can."""
    ports: Mapping[str, bool] = field(default_factory=dict)
    """For each other host, by name: whether packets from this host reach its port FIRST_PORT."""
    twins: tuple[SameUuid, ...] = ()
    """What is known about other names whose hosts have the same libvirt host UUID."""
    fence: FenceSeen | None = None
    """The status of the host's fence devices; None if the inventory has none."""


def check_host(examined: Examined, now: datetime) -> tuple[Finding, ...]:
    """Check one host. Returns its findings in the order of the checks."""
    found = [*_libvirt(examined)]
    if examined.facts is not None:
        found += _accelerator(examined, examined.facts)
        found += known_problems.of_host(examined.host.name, examined.facts)
        found += _memory(examined.host.name, examined.facts)
    found += _ssh(examined)
    if examined.probe is not None:
        found += _clock(examined.host.name, examined.probe)
        found += _post_copy(examined.host.name, examined.probe)
        found += _shared_memory(examined.host.name, examined.probe)
        found += _watchdog(examined.host.name, examined.probe)
        found += _write_tracking(examined.host.name, examined.probe)
        found += _storage(examined.host, examined.probe)
        found += _certificates(examined.host.name, examined.probe, now)
    found += _peers(examined)
    if examined.fence is not None:
        found += _fence(examined, examined.fence)
    return tuple(found)


def _finding(
    code: str, severity: Severity, where: str, text: str, hint: str | None = None
) -> Finding:
    return Finding(code=code, severity=severity, where=where, text=text, hint=hint)


def _libvirt(examined: Examined) -> Iterator[Finding]:
    name, facts = examined.host.name, examined.facts
    if facts is None:
        yield _finding(
            "libvirt",
            Severity.BLOCKER,
            name,
            examined.facts_error or "no answer",
            f"run systemctl status libvirtd on {name}",
        )
        return
    for what, version, oldest, package in (
        ("libvirt", facts.libvirt_version, OLDEST_LIBVIRT, "libvirt-daemon-system"),
        ("qemu", facts.qemu_version, OLDEST_QEMU, _qemu_package(facts)),
    ):
        new_enough = known_problems.version(version) >= oldest
        least = ".".join(str(part) for part in oldest)
        yield _finding(
            f"{what}-version",
            Severity.OK if new_enough else Severity.BLOCKER,
            name,
            f"{what} {version}" + ("" if new_enough else f" is older than {least}"),
            None if new_enough else f"run apt-get install {package} (from backports)",
        )
    for same in examined.twins:
        code = "one-host" if same.one else "same-libvirt"
        hint = same.hint
        if same.one is None:
            hint = (
                "if they are one host, leave one of the names out of hosts.yaml; if not, set"
                " host_uuid in /etc/libvirt/libvirtd.conf on one of them to the output of uuidgen,"
                " then restart libvirtd"
            )
        yield _finding(code, Severity.BLOCKER, name, same.text, hint)


def _accelerator(examined: Examined, facts: HostFacts) -> Iterator[Finding]:
    name = examined.host.name
    if examined.kvm_boots:
        yield _finding("accelerator", Severity.OK, name, "KVM works: a standard kernel has booted")
    elif examined.probe is not None and examined.probe.kvm_device and examined.kvm_boots is False:
        yield _finding(
            "accelerator",
            Severity.WARNING,
            name,
            "/dev/kvm exists, but KVM cannot boot a standard kernel: guests need TCG (type 'qemu')",
            "run kvm-ok; if the host is a virtual machine, enable nested virtualisation",
        )
    elif "kvm" in facts.accelerators:
        yield _finding("accelerator", Severity.INFO, name, "KVM is available; it was not tested")
    else:
        yield _finding(
            "accelerator",
            Severity.WARNING,
            name,
            "no KVM: guests run under TCG, which is many times slower",
            "enable virtualisation in the firmware; if the host is a virtual machine, enable nested"
            " virtualisation",
        )


def _memory(name: str, facts: HostFacts) -> Iterator[Finding]:
    short = facts.memory_free < 512 * MIB or facts.memory_free < facts.memory // 20
    yield _finding(
        "memory",
        Severity.WARNING if short else Severity.OK,
        name,
        f"{show_bytes(facts.memory_free)} of {show_bytes(facts.memory)} free",
        "move a guest off the host before you move another guest to it" if short else None,
    )


def _ssh(examined: Examined) -> Iterator[Finding]:
    name = examined.host.name
    if examined.host.ssh is None:
        yield _finding(
            "ssh",
            Severity.WARNING,
            name,
            "no ssh address: storage and networks cannot be verified",
            ADD_SSH,
        )
    elif examined.probe_error is not None:
        yield _finding(
            "ssh",
            Severity.BLOCKER,
            name,
            examined.probe_error,
            examined.probe_hint or f"run {_login(examined.host.ssh)}",
        )
    else:
        yield _finding(
            "ssh", Severity.OK, name, f"login as {examined.host.ssh.user} works, host key verified"
        )


def _login(where: SshAddress) -> str:
    """Return the command that logs in as vmckpt does."""
    words = ["ssh", "-p", str(where.port)]
    if where.key_file is not None:
        words += ["-i", str(where.key_file)]
    if where.known_hosts is not None:
        words += ["-o", f"UserKnownHostsFile={where.known_hosts}"]
    return shlex.join([*words, f"{where.user}@{where.address}"])


def _clock(name: str, probe: HostProbe) -> Iterator[Finding]:
    off = abs(probe.clock_skew) - probe.clock_uncertainty > _SKEW
    yield _finding(
        "clock-skew",
        Severity.WARNING if off else Severity.OK,
        name,
        f"clock differs by {show_seconds(abs(probe.clock_skew))}"
        f" (±{show_seconds(probe.clock_uncertainty)})",
        "run timedatectl set-ntp true on the host" if off else None,
    )


def _post_copy(name: str, probe: HostProbe) -> Iterator[Finding]:
    if not probe.userfaultfd:
        yield _finding(
            "post-copy",
            Severity.WARNING,
            name,
            "the kernel lacks userfaultfd: post-copy does not work, and a snapshot may pause a"
            " guest for the complete capture",
            "boot a kernel with CONFIG_USERFAULTFD",
        )
    elif probe.post_copy_by_root_only:
        yield _finding(
            "post-copy",
            Severity.WARNING,
            name,
            "only root may use userfaultfd: unless QEMU runs as root, post-copy does not work, and"
            " a snapshot may pause a guest for the complete capture",
            "run on the host: echo vm.unprivileged_userfaultfd=1 >/etc/sysctl.d/60-vmckpt.conf"
            " && sysctl --system",
        )
    else:
        yield _finding("post-copy", Severity.OK, name, "userfaultfd is available")


def _shared_memory(name: str, probe: HostProbe) -> Iterator[Finding]:
    on_memory = probe.memory_backing_kind in ("tmpfs", "hugetlbfs")
    yield _finding(
        "shared-memory",
        Severity.OK if on_memory else Severity.WARNING,
        name,
        f"shared guest memory is in {probe.memory_backing_dir} ({probe.memory_backing_kind})",
        None
        if on_memory
        else 'set memory_backing_dir = "/dev/shm" in /etc/libvirt/qemu.conf, then restart libvirtd',
    )


def _watchdog(name: str, probe: HostProbe) -> Iterator[Finding]:
    """Yield findings on what would enforce the leases of protected guests on the host."""
    kept_by = rules.kill_method(timer=probe.no_trace is None, systemd=probe.systemd)
    why = "" if probe.no_trace is None else f" (not by the kernel: {probe.no_trace})"
    severity, hint = _WATCHDOGS[kept_by], None
    if probe.no_trace is not None:
        hint = _TRACES[probe.no_trace]
    elif probe.untested:
        severity, why, hint = Severity.INFO, _UNTESTED, _TRY
    yield _finding(
        "watchdog", severity, name, f"leases of protected guests are enforced by {kept_by}{why}",
        hint,
    )  # fmt: skip


def _write_tracking(name: str, probe: HostProbe) -> Iterator[Finding]:
    """Yield findings on whether the host can find the pages that its guests write."""
    if probe.kernel is None:
        return
    version = ".".join(map(str, probe.kernel))
    why, hint = None, None
    if probe.kernel < TRACKS_WRITES:
        needed = ".".join(map(str, TRACKS_WRITES))
        why = f"Linux is {version}; {needed} or later is needed"
        hint = f"boot Linux {needed} or later"
    elif probe.no_trace is not None:
        why, hint = str(probe.no_trace), _TRACES[probe.no_trace]
    untested = why is None and probe.untested
    yield _finding(
        "write-tracking", Severity.INFO if why or untested else Severity.OK, name,
        f"writes of guests can be tracked (Linux {version}){_UNTESTED if untested else ''}"
        if why is None else
        "writes of guests can be tracked only by soft-dirty bits, which is slower, and snapshots"
        f" read all memory: {why}"
        if probe.soft_dirty else
        "writes of guests cannot be tracked, so protections compare all memory in each epoch, and"
        f" snapshots read all memory: {why}, and the kernel has no soft-dirty bits",
        _TRY if untested else hint,
    )  # fmt: skip


def _storage(host: Host, probe: HostProbe) -> Iterator[Finding]:
    for path in host.storage:
        room = probe.storage_free.get(path)
        if room is None:
            yield _finding(
                "storage",
                Severity.WARNING,
                host.name,
                f"{path} does not exist",
                f"mount it, or remove it from the list `storage` of {host.name} in the inventory",
            )
        else:
            short = room < 1024 * MIB
            yield _finding(
                "storage",
                Severity.WARNING if short else Severity.OK,
                host.name,
                f"{path}: {show_bytes(room)} free",
                "free some space" if short else None,
            )


def _certificates(name: str, probe: HostProbe, now: datetime) -> Iterator[Finding]:
    for path, use in _NEEDED.items():
        if path not in probe.certificates:
            yield _finding(
                "certificate",
                Severity.INFO,
                name,
                f"{path} is missing; it is required for {use}",
                "see libvirt's TLS certificate guide (kbase/tlscerts)",
            )
    for path, pem in sorted(probe.certificates.items()):
        try:
            ends = x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc
        except ValueError:
            yield _finding(
                "certificate",
                Severity.WARNING,
                name,
                f"{path} is not a certificate",
                f"replace {path}",
            )
            continue
        days = (ends - now).days
        severity = Severity.OK
        if ends <= now + _EXPIRES_SOON:
            severity = Severity.WARNING if ends > now else Severity.BLOCKER
        span = show_count(abs(days), "day")
        state = f"valid for {span}" if ends > now else f"expired {span} ago"
        yield _finding(
            "certificate",
            severity,
            name,
            f"{path} {state}",
            None if severity is Severity.OK else f"renew {path}",
        )


def _qemu_package(facts: HostFacts) -> str:
    """Return the Debian package with the QEMU for the host's own architecture."""
    arm = ("aarch64", "kvm") in facts.platforms
    return "qemu-system-arm" if arm else "qemu-system-x86"


def _peers(examined: Examined) -> Iterator[Finding]:
    name = examined.host.name
    for other, error in sorted(examined.logins.items()):
        yield _finding(
            "peer-login",
            Severity.OK if error is None else Severity.WARNING,
            name,
            f"can log in to libvirtd on {other}"
            if error is None
            else f"cannot log in to libvirtd on {other} ({error}): client-driven migrations only",
            None if error is None else f"set peer_uri of {other} to a URI that {name} can use",
        )
    for other, open_ in sorted(examined.ports.items()):
        yield _finding(
            "migration-ports",
            Severity.OK if open_ else Severity.BLOCKER,
            name,
            f"can reach TCP port {FIRST_PORT} of {other}"
            if open_
            else f"packets to port {FIRST_PORT} of {other} are dropped",
            None if open_ else f"open TCP {FIRST_PORT}-49215 on {other} for {name}",
        )


def _fence(examined: Examined, seen: FenceSeen) -> Iterator[Finding]:
    for device in seen.devices:
        yield _fence_device(examined, seen, device)
    for path in seen.too_open:
        yield _finding(
            "fence-password", Severity.WARNING, examined.host.name,
            f"other users may read the password in {path}", f"run chmod 600 {path}",
        )  # fmt: skip


def _fence_device(examined: Examined, seen: FenceSeen, device: DeviceSeen) -> Finding:
    """Return the finding on one fence device.

    The finding is never a blocker, because migrations do not need fencing.
    """
    name, answers = examined.host.name, examined.facts is not None
    severity, hint = Severity.WARNING, f"correct the fence: entry of {name} in the inventory"
    if device.ran is None:
        why = device.error or "not queried"
        text = why if device.name == device.agent else f"{device.name}: {why}"
        hint = device.hint or hint
    elif device.power is Power.UNKNOWN:
        text = f"{device.name} does not report the power state: {device.ran.in_words}"
        hint = f"run {device.agent} by hand with its options and action=status"
    elif device.power is Power.OFF and answers and seen.all_off(device.level):
        text = (
            f"{device.name} reports power off, but {name} answers: the device controls another"
            f" machine, or {name} has a power supply that is not in the inventory"
        )
    elif device.power is Power.OFF and answers:
        text = f"{device.name} reports power off: {name} runs on its other power supplies only"
        hint = (
            "switch that power supply on; if it is on, correct the fence: entry of"
            f" {name} in the inventory"
        )
    else:
        severity, hint = Severity.OK, ""
        text = f"{device.name} reports power {device.power}"
    return _finding("fence", severity, name, text, hint or None)


_LEAST = 2048 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """The facts about one host that matter for snapshots."""

    name: str
    agent: str | None
    """Why the agent cannot be started on the host; None if it can."""
    state: str
    """The directory that contains captured memory until the memory is stored."""
    room: Bytes | None
    """Free space in the directory `state`; None if agents cannot write to it."""
    stores: Mapping[str, str | None]
    """For each store in a directory, by name: why agents cannot write to it; None: they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReady:
    """The facts about one store, as seen from the controller."""

    wrong: str | None = None
    """Why the store cannot be used; None if it can."""
    hint: str | None = None
    tried: bool = True
    """Whether the store was tested for the guarantees that locks require."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReady:
    """The facts about the controller that matter for snapshots."""

    stores: Mapping[str, StoreReady]
    admins: Sequence[str]
    """Names of the keys for which new snapshots are encrypted."""
    keys: str | None
    """Why the keys cannot be read; None if they can."""


def of_host(ready: HostReady) -> Iterator[Finding]:
    """Yield the findings about a host that concern snapshots."""
    yield _warning(
        "snapshot-agent", ready.name, ready.agent or "vmckpt's agent can be started", ready.agent,
        'install the agent manually (see "The agent" in docs/hosts.md)',
    )  # fmt: skip
    yield _room(ready)
    for store, why in ready.stores.items():
        yield _warning(
            "snapshot-store", ready.name, f"store {store}: {why or 'is writable'}", why,
            f"mount it read-write on {ready.name}, at the path in hosts.yaml",
        )  # fmt: skip


def of_controller(ready: ControllerReady) -> Iterator[Finding]:
    """Yield the findings about the controller that concern snapshots."""
    where = "controller"
    for store, seen in ready.stores.items():
        text = seen.wrong or "can be opened" + (", and its locks work" if seen.tried else "")
        yield _warning(
            "snapshot-store", where, f"store {store}: {text}", seen.wrong,
            seen.hint or "correct the store in hosts.yaml",
        )  # fmt: skip
    if ready.keys is not None:
        yield _warning(
            "snapshot-keys", where, ready.keys, ready.keys, "run vmckpt snapshot keys list"
        )
        return
    open_ = None if ready.admins else "snapshots are not encrypted"
    names = ", ".join(ready.admins)
    yield _warning(
        "snapshot-keys", where, open_ or f"snapshots are encrypted for {names}", open_,
        "run vmckpt snapshot keys new FILE, then vmckpt snapshot keys add NAME KEY",
    )  # fmt: skip


def _room(ready: HostReady) -> Finding:
    hint = "set agent_state in hosts.yaml to another directory"
    if ready.room is None:
        why = f"{ready.state} is not writable"
        return _warning("snapshot-room", ready.name, why, why, hint)
    short = "; a capture stores a guest's memory there" if ready.room < _LEAST else None
    text = f"{ready.state}: {show_bytes(ready.room)} free{short or ''}"
    return _warning("snapshot-room", ready.name, text, short, f"free some space, or {hint}")


def _warning(code: str, where: str, text: str, wrong: str | None, hint: str) -> Finding:
    return Finding(
        code=code, severity=Severity.OK if wrong is None else Severity.WARNING, where=where,
        text=text, hint=None if wrong is None else hint,
    )  # fmt: skip
