"""Build the fleet of a plan from the hosts' reports about themselves and their guests. Pure.

The hosts report which files two hosts share and which CPUs a host can offer. This module translates
these answers into names: what a place offers and what a guest needs. The module also determines
whether a guest itself prevents its move, regardless of policies and other hosts.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from vmckpt.evacuation.plan.fleet import Fleet, Needs, Place, Tenant
from vmckpt.model.guest import Guest, GuestState
from vmckpt.model.host import Host, HostFacts
from vmckpt.policy.model import CopyKind, Evacuation, Policy, Strategy
from vmckpt.units import MIB, Bytes, BytesPerSecond


def fixed(guest: Guest) -> str | None:
    """Return why a guest cannot migrate live to any host, as preflight would; None if it can."""
    if (why := tied(guest)) is not None:
        return why
    if guest.refusals:
        return f"it {guest.refusals[0].what}"
    if guest.snapshots:
        return _snapshots(guest)
    if not guest.state.runs:
        return f"it is {guest.state.in_words}"
    return None


def immovable(guest: Guest) -> str | None:
    """Return why a guest that is off cannot be defined on another host; None if it can.

    The move does not test whether the guest starts there, and libvirt moves only the definition,
    without the guest's data.
    """
    if guest.snapshots:
        return _snapshots(guest)
    if (why := tied(guest)) is not None:
        return why
    if guest.saved:
        return (
            "its memory is saved on its host (managed save); on another host it would boot instead"
        )
    if guest.directories:
        return f"a directory of its host is shared with it: {guest.directories[0]}"
    if guest.tpm:
        return "its TPM state is on its host and can move only while the guest is running"
    for disk in guest.disks:
        if disk.kind not in ("file", "network") and not disk.read_only:
            return f"its disk {disk.target} ({disk.kind}) cannot be compared between hosts"
    return None


def tied(guest: Guest) -> str | None:
    """Return why a guest can neither move nor be saved; None if nothing ties it to its host."""
    if guest.host_devices:
        return f"it uses a host device: {guest.host_devices[0]}"
    return None


def _snapshots(guest: Guest) -> str:
    return f"libvirt cannot move a guest with snapshots; this guest has {guest.snapshots}"


OVERHEAD = 128 * MIB
"""Memory that the QEMU process uses in addition to the guest's memory, as in preflight."""
_STAND = {
    GuestState.STANDBY: "it is the standby of a guest that is protected elsewhere",
    GuestState.TEST: "it is a copy for a failover test",
    GuestState.CRASHED: "it has crashed, and its state is preserved on its host",
    GuestState.UNKNOWN: "its state is unknown",
}
"""States in which a guest uses memory but is not moved, with the reason."""
_BROKEN = (GuestState.CRASHED, GuestState.UNKNOWN)
_LEFT_OFF = "it is off, and its policy has move_shut_off: false"


class TravelMethod(StrEnum):
    """How a guest moves to another host."""

    LIVE = "live"
    OFFLINE = "offline"
    """The guest is off; its definition is moved."""
    SWITCH = "switch"
    """The guest is protected: its standby takes over in a planned switchover."""
    ANEW = "protect anew"
    """The standby of a guest on another host is replaced by a new standby."""


ON_ITS_WAY = "it is already being moved"
_LAST = -1_000_000
"""The priority of standbys, so that no running guest waits for a standby."""
# These texts contain no names, so that equal needs of many guests are examined only once.
_ITSELF, _NAMESAKE = "the guest or its standby is there", "a guest with the same name is there"
_SAME_UUID = "it has the same libvirt host UUID as the guest's host; run vmckpt doctor"
_SMALL = Bytes(1 * MIB)
"""Bytes to be sent for a guest whose memory is not sent."""
UNKNOWN_LINK = BytesPerSecond(125_000_000)
"""Assumed bandwidth of a link until a plan has forecasts: 1 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The answer of one host."""

    host: Host
    facts: HostFacts | None = None
    guests: tuple[Guest, ...] = ()
    links: frozenset[str] | None = None
    """Bridges and interfaces; None if they could not be queried."""
    error: str | None = None
    """Why the host does not answer; None if it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A guest with a standby."""

    primary: str
    backup: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers from all hosts, and what the journal records about them."""

    looks: tuple[Look, ...]
    same: Mapping[tuple[str, str], Mapping[str, bool]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Whether the target sees each file of the source's guests, by source and target."""
    fits: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    """CPUs that each host can offer, by host, as names that `cpu` returns."""
    closed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Hosts on which no guest may be placed, with the reason."""
    protected: Mapping[str, Protected] = field(default_factory=lambda: MappingProxyType({}))
    """Guests with an active protection, by UUID."""

    def look(self, host: str) -> Look:
        """Return the answer of a host. Raises StopIteration if there is no such host."""
        return next(one for one in self.looks if one.host.name == host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A guest, with its host, its policy and how it moves."""

    name: str
    """The guest's name in the plan."""
    guest: Guest
    host: str
    policy: Policy
    way: TravelMethod = TravelMethod.LIVE

    @property
    def suspends(self) -> bool:
        """Whether the policy saves the guest's memory on its host instead of moving the guest."""
        return self.policy.evacuation.strategy is Strategy.SUSPEND


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """A fleet, with details of its guests by name."""

    fleet: Fleet
    known: Mapping[str, Known]
    silent: Mapping[str, str]
    """Hosts that do not answer, with the reason."""
    stuck: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Guests that cannot be moved in their current state: their names in the fleet, by UUID."""


def cpu(guest: Guest) -> str:
    """Return a name for the CPU that a guest needs: "x86_64 kvm", "x86_64 kvm host-model 3fa2"."""
    kind = f"{guest.arch} {guest.accelerator}"
    if guest.cpu_xml is None:
        return kind
    mark = hashlib.blake2s(guest.cpu_xml.encode(), digest_size=2).hexdigest()
    return f"{kind} {guest.cpu_mode or 'custom'} {mark}"


def files(guest: Guest) -> list[str]:
    """Return the writable files of the guest's disks, which hosts must share unless copied."""
    return [
        disk.source for disk in guest.disks
        if disk.kind == "file" and disk.source is not None and not disk.read_only
    ]  # fmt: skip


def all_files(guest: Guest) -> list[str]:
    """Return the guest's writable files with their backing files, and its NVRAM file.

    For a running guest, preflight checks backing files and NVRAM.
    """
    nvram = [guest.nvram] if guest.nvram is not None else []
    return files(guest) + [file for disk in guest.disks for file in disk.below] + nvram


def networks(guest: Guest) -> frozenset[str]:
    """Return the bridges and networks that the guest is connected to."""
    return frozenset(nic.source for nic in guest.nics if nic.source is not None)


def names(looks: Sequence[Look]) -> dict[tuple[str, str], str]:
    """Return each guest's name in a plan, by host and UUID: its own if unique, else its UUID."""
    uuids: dict[str, set[str]] = {}
    for look in looks:
        for guest in look.guests:
            uuids.setdefault(guest.name, set()).add(guest.uuid)
    return {
        (look.host.name, guest.uuid): guest.name if len(uuids[guest.name]) == 1 else guest.uuid
        for look in looks for guest in look.guests
    }  # fmt: skip


def fleet_view(
    answers: Answers, policies: Mapping[tuple[str, str], Policy], run: Evacuation,
    emptied: str | None = None,
) -> FleetView:  # fmt: skip
    """Return the fleet. `policies`: by host and UUID of each guest; `run`: the policy's evacuation
    settings; `emptied`: the host whose standbys are to move, too, if any.

    A guest that is active on two hosts is already being moved, so it is not moved again.
    """
    called = names(answers.looks)
    running, off = _count(answers, active=True), _count(answers, active=False)
    tenants, known = [], {}
    stuck: dict[str, tuple[str, ...]] = {}
    for look in answers.looks:
        for guest in look.guests:
            standing = guest.state in _STAND
            is_off = guest.state is GuestState.SHUT_OFF
            if is_off and running[guest.uuid]:
                continue  # its old definition on a former host
            name = called[look.host.name, guest.uuid]
            arriving = running[guest.uuid] > 1 and not guest.leaves
            twice = is_off and off[guest.uuid] > 1
            if standing or arriving or twice:
                name = f"{name} on {look.host.name}"
            policy = policies[look.host.name, guest.uuid]
            goes = look.host.name == emptied and _is_standby(guest, look, answers, policy)
            way = TravelMethod.ANEW if goes else _way(guest, answers, off=is_off)
            stays = None if goes else _stays(guest, look, answers, policy, way)
            if running[guest.uuid] > 1:
                stays = ON_ITS_WAY
            elif twice:
                stays = "it is off, and also defined on another host"
            one = Known(name=name, guest=guest, host=look.host.name, policy=policy, way=way)
            tenants.append(_tenant(one, answers, stays))
            if goes or not (standing or arriving or twice):
                known[name] = one
            elif twice or guest.state in _BROKEN:
                stuck[guest.uuid] = *stuck.get(guest.uuid, ()), name
    return FleetView(
        fleet=Fleet(tuple(_place(one, answers, run) for one in answers.looks), tuple(tenants)),
        known=MappingProxyType(known),
        silent=MappingProxyType(
            {one.host.name: one.error for one in answers.looks if one.error is not None}
        ),
        stuck=MappingProxyType(stuck),
    )


def _count(answers: Answers, *, active: bool) -> Counter[str]:
    """Count the hosts on which each guest is active or, unless `active`, shut off."""
    return Counter(
        guest.uuid for look in answers.looks for guest in look.guests
        if (guest.state.is_active if active else guest.state is GuestState.SHUT_OFF)
    )  # fmt: skip


def moved(seen: FleetView, name: str, target: str) -> FleetView:
    """Return the view after a move. The files that the new host shares are not known yet."""
    tenants = tuple(
        replace(one, host=target) if one.name == name else one for one in seen.fleet.tenants
    )
    known = dict(seen.known)
    if name in known:
        known[name] = replace(known[name], host=target)
    return replace(seen, fleet=replace(seen.fleet, tenants=tenants), known=MappingProxyType(known))


def _way(guest: Guest, answers: Answers, *, off: bool) -> TravelMethod:
    if off:
        return TravelMethod.OFFLINE
    return TravelMethod.SWITCH if guest.uuid in answers.protected else TravelMethod.LIVE


def _is_standby(guest: Guest, look: Look, answers: Answers, policy: Policy) -> bool:
    """Return whether `guest` is a standby that a standby on another host may replace."""
    protected = answers.protected.get(guest.uuid)
    return (
        guest.state is GuestState.STANDBY
        and protected is not None
        and protected.backup == look.host.name
        and policy.evacuation.strategy is not Strategy.LEAVE
    )


def _stays(
    guest: Guest, look: Look, answers: Answers, policy: Policy, way: TravelMethod
) -> str | None:
    """Return why a guest is not moved; None if it may be moved."""
    if (why := _STAND.get(guest.state)) is not None:
        return why
    if policy.evacuation.strategy is Strategy.LEAVE:
        return f"its policy {policy.name} has strategy: leave"
    if way is TravelMethod.OFFLINE:
        return immovable(guest) if policy.evacuation.move_shut_off else _LEFT_OFF
    if way is TravelMethod.SWITCH:
        return _unswitchable(guest, look, answers)
    if guest.leaves:
        return ON_ITS_WAY
    if guest.job is not None:
        return f"it has a job in progress: {guest.job}"
    if policy.evacuation.strategy.stops:
        return _unstoppable(guest, policy.evacuation.strategy)
    return fixed(guest)


def _unstoppable(guest: Guest, strategy: Strategy) -> str | None:
    """Return why a guest cannot be stopped and started again; None if it can."""
    if not guest.persistent:
        return "it is transient: stopping it would delete its definition"
    return tied(guest) if strategy is Strategy.SUSPEND else None


def _unswitchable(guest: Guest, look: Look, answers: Answers) -> str | None:
    """Return why a protected guest cannot switch to its standby; None if it can."""
    protected = answers.protected[guest.uuid]
    ready = any(
        one.uuid == guest.uuid and one.state is GuestState.STANDBY
        for other in answers.looks if other.host.name == protected.backup for one in other.guests
    )  # fmt: skip
    if look.host.name == protected.primary and ready:
        return None
    return f"it is protected ({protected.job}), and cannot switch to {protected.backup} now"


def _tenant(one: Known, answers: Answers, stays: str | None) -> Tenant:
    guest, wants = one.guest, one.policy.evacuation
    groups = {f"{key}={guest.labels[key]}" for key in wants.apart if key in guest.labels}
    made = Tenant(
        name=one.name, host=one.host, memory=Bytes(guest.memory + OVERHEAD),
        cpus=float(guest.vcpus), needs=_needs(guest, one.host, one.policy, answers),
        apart=frozenset(groups), priority=wants.priority, stays=stays,
        prefers=frozenset(wants.prefers), size=guest.memory,
    )  # fmt: skip
    match one.way:
        case TravelMethod.OFFLINE:
            return replace(made, memory=Bytes(0), cpus=0.0, size=_SMALL)
        case TravelMethod.SWITCH if stays is None:
            backup = answers.protected[guest.uuid].backup
            return replace(made, needs=Needs(only=frozenset({backup})), size=_SMALL)
        case TravelMethod.ANEW:  # the new standby gets new images, after all guests have left
            needs = replace(made.needs, storage=frozenset())
            return replace(made, needs=needs, priority=_LAST)
        case _:
            return made


def started(tenant: Tenant, guest: Guest) -> Tenant:
    """Return the tenant of a guest that is off, with the memory and CPUs that it will use."""
    return replace(tenant, memory=Bytes(guest.memory + OVERHEAD), cpus=float(guest.vcpus))


def _needs(guest: Guest, host: str, policy: Policy, answers: Answers) -> Needs:
    taken = frozenset(
        (look.host.name, _ITSELF if one.uuid == guest.uuid else _NAMESAKE)
        for look in answers.looks if look.host.name != host for one in look.guests
        if (one.uuid == guest.uuid and one.state.is_active)
        or (one.uuid != guest.uuid and one.name == guest.name)
    )  # fmt: skip
    own = answers.look(host).facts
    taken |= frozenset(
        (look.host.name, _SAME_UUID) for look in answers.looks
        if look.host.name != host and own is not None
        and look.facts is not None and look.facts.uuid == own.uuid
    )  # fmt: skip
    off = guest.state is GuestState.SHUT_OFF
    copied = policy.storage.copy is not CopyKind.SHARED
    return Needs(
        cpu=cpu(guest), machine=guest.machine, networks=networks(guest),
        storage=frozenset() if copied else frozenset(
            {_seen_there(host, one) for one in all_files(guest)} if off
            else {f"{host}:{one}" for one in files(guest)}
        ),
        labels=frozenset(policy.evacuation.needs), never=taken,
    )  # fmt: skip


def _seen_there(host: str, file: str) -> str:
    """Return the name of a file that another host must be known to share.

    A live migration shows at once whether the target has the file. For a guest that is off, a
    missing disk would be noticed only when the guest is started, perhaps months later.
    """
    return f"{host}:{file} (the guest is off, so vmckpt must find this file there over ssh)"


def _place(look: Look, answers: Answers, run: Evacuation) -> Place:
    name, facts = look.host.name, look.facts
    if facts is None:
        # The plan names the silent hosts; equal texts are counted, not listed.
        return Place(name=name, memory=Bytes(0), cpus=0.0, closed="the host does not answer")
    held = sum(
        one.memory + OVERHEAD for one in look.guests
        if one.state.is_active or one.state in _STAND
    )  # fmt: skip
    has = facts.networks | (look.links or frozenset())
    if look.links is None:  # unknown: libvirt decides, and preflight warns
        has |= frozenset(name for one in answers.looks for g in one.guests for name in networks(g))
    storage = {f"{name}:{file}" for guest in look.guests for file in all_files(guest)}
    for (source, target), found in answers.same.items():
        if target == name:  # where it is unknown, libvirt decides, and preflight warns
            theirs = {file for guest in answers.look(source).guests for file in all_files(guest)}
            storage |= {f"{source}:{file}" for file in theirs if found.get(file, True)}
            storage |= {_seen_there(source, file) for file in theirs if found.get(file)}
    return Place(
        # Guests may not use all their memory yet, so the sum is limited to the host's memory.
        name=name, memory=Bytes(min(facts.memory, held + facts.memory_free)),
        cpus=facts.cpus * run.cpu_overcommit, offers=answers.fits.get(name, frozenset()),
        machines=facts.machines, networks=has, storage=frozenset(storage),
        labels=look.host.labels, closed=answers.closed.get(name),
        link=UNKNOWN_LINK,
    )  # fmt: skip
