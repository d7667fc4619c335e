"""What hosts say about themselves and their guests, made into a fleet. Pure.

Which files two hosts share and which CPU a host can give is asked of the hosts themselves; here the
answers become what a place offers and a guest needs, by names that say what they mean. What in a
guest itself keeps it where it is, whatever policies and other hosts say, is found here, too.
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
    """Why a guest that runs cannot move; preflight would say so of any target. None: it can."""
    if (why := tied(guest)) is not None:
        return why
    if guest.snapshots:
        return _snapshots(guest)
    if not guest.state.runs:
        return f"it is {guest.state}"
    return None


def immovable(guest: Guest) -> str | None:
    """Why a guest that is off is not defined elsewhere: nobody tries there before it is started,
    and libvirt moves its definition without what belongs to it."""
    if guest.snapshots:
        return _snapshots(guest)
    if (why := tied(guest)) is not None:
        return why
    if guest.saved:
        return "its memory is saved on its host (managed save): elsewhere it would begin anew"
    if guest.tpm:
        return "its TPM's state is its host's, and moves only while it runs"
    for disk in guest.disks:
        if disk.kind not in ("file", "network") and not disk.read_only:
            return f"nobody can see whether another host has its disk {disk.target} ({disk.kind})"
    return None


def tied(guest: Guest) -> str | None:
    """What of a guest neither moves nor can be saved."""
    if guest.host_devices:
        return f"it holds a device of its host: {guest.host_devices[0]}"
    return None


def _snapshots(guest: Guest) -> str:
    return f"libvirt moves no guest with snapshots; it has {guest.snapshots}"


OVERHEAD = 128 * MIB
"""QEMU's own memory beside the guest's, as preflight counts it."""
_STAND = {
    GuestState.STANDBY: "it is the standby of a guest that is protected elsewhere",
    GuestState.TEST: "it is a copy for a failover test",
    GuestState.CRASHED: "it has crashed, and its host keeps what is left of it",
    GuestState.UNKNOWN: "what it does is not known",
}
"""Who takes room, and is nobody to be moved."""
_BROKEN = (GuestState.CRASHED, GuestState.UNKNOWN)
_LEFT_OFF = "it is off, and its policy leaves it"


class TravelMethod(StrEnum):
    """How a guest gets to another host."""

    LIVE = "live"
    OFFLINE = "offline"
    """It is off: its definition moves."""
    SWITCH = "switch"
    """It is protected: its standby takes over, by plan."""
    ANEW = "protect anew"
    """It is a standby: its guest, which runs elsewhere, gets another one."""


ON_ITS_WAY = "it is on its way already"
_LAST = -1_000_000
"""The priority of standbys: nobody who runs waits for one."""
# Without names: what many guests need alike is looked for once.
_ITSELF, _NAMESAKE = "the guest or its standby is there", "another guest of that name is there"
_SMALL = Bytes(1 * MIB)
"""What travels where no memory does."""
UNKNOWN_LINK = BytesPerSecond(125_000_000)
"""Until a plan has forecasts: 1 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One host."""

    host: Host
    facts: HostFacts | None = None
    guests: tuple[Guest, ...] = ()
    links: frozenset[str] | None = None
    """Bridges and interfaces; None: could not be asked."""
    error: str | None = None
    """Why it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A guest with a standby."""

    primary: str
    backup: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All that was found out."""

    looks: tuple[Look, ...]
    same: Mapping[tuple[str, str], Mapping[str, bool]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """For a source and a target, which files of the source's guests both see."""
    fits: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    """For each host, the CPUs that it can give; see `cpu`."""
    closed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Hosts that nothing may be placed on, and why."""
    protected: Mapping[str, Protected] = field(default_factory=lambda: MappingProxyType({}))
    """Guests that agents have in their hands, by UUID."""

    def look(self, host: str) -> Look:
        """Raises KeyError."""
        return next(one for one in self.looks if one.host.name == host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One guest."""

    name: str
    """In a plan."""
    guest: Guest
    host: str
    policy: Policy
    way: TravelMethod = TravelMethod.LIVE

    @property
    def suspends(self) -> bool:
        """Whether it is saved where it is, if it stops."""
        return self.policy.evacuation.strategy is Strategy.SUSPEND


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """A fleet, and who is behind its names."""

    fleet: Fleet
    known: Mapping[str, Known]
    silent: Mapping[str, str]
    """Hosts that do not answer, and why."""
    stuck: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Guests that cannot be moved as they are, by UUID: their names in the fleet, one a host."""


def cpu(guest: Guest) -> str:
    """A name for the CPU that a guest needs, with what runs it: "kvm", "kvm host-model 3fa2"."""
    if guest.cpu_xml is None:
        return guest.accelerator
    mark = hashlib.blake2s(guest.cpu_xml.encode(), digest_size=2).hexdigest()
    return f"{guest.accelerator} {guest.cpu_mode or 'custom'} {mark}"


def files(guest: Guest) -> list[str]:
    """Files of its disks that are written to, and must be the same on both hosts."""
    return [
        disk.source for disk in guest.disks
        if disk.kind == "file" and disk.source is not None and not disk.read_only
    ]  # fmt: skip


def all_files(guest: Guest) -> list[str]:
    """With those that they lie on, and its NVRAM. Of a guest that runs preflight looks at these."""
    nvram = [guest.nvram] if guest.nvram is not None else []
    return files(guest) + [file for disk in guest.disks for file in disk.below] + nvram


def networks(guest: Guest) -> frozenset[str]:
    """Bridges and networks that it is plugged into."""
    return frozenset(nic.source for nic in guest.nics if nic.source is not None)


def names(looks: Sequence[Look]) -> dict[tuple[str, str], str]:
    """What each guest is called in a plan, by host and UUID: its name, if no other has it."""
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
    """The fleet. `policies`: of each guest by its host and UUID; `run`: the terms of emptying;
    `emptied`: the host whose standbys are to wait elsewhere, too.

    A guest that two hosts have running is taken from neither: it is on its way.
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
                continue  # what is left of it where it was
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
                stays = "it is off, and defined on another host, too"
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
    """On how many hosts each guest runs, or is off."""
    return Counter(
        guest.uuid for look in answers.looks for guest in look.guests
        if (guest.state.is_active if active else guest.state is GuestState.SHUT_OFF)
    )  # fmt: skip


def moved(seen: FleetView, name: str, target: str) -> FleetView:
    """A guest has gone there. What it shares with other hosts from there is not known yet."""
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
    """Whether it waits there for a guest that may have another standby instead."""
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
    """Why a guest is not moved; None: it may be."""
    if (why := _STAND.get(guest.state)) is not None:
        return why
    if policy.evacuation.strategy is Strategy.LEAVE:
        return f"its policy {policy.name} leaves it where it is"
    if way is TravelMethod.OFFLINE:
        return immovable(guest) if policy.evacuation.move_shut_off else _LEFT_OFF
    if way is TravelMethod.SWITCH:
        return _unswitchable(guest, look, answers)
    if guest.leaves:
        return ON_ITS_WAY
    if guest.job is not None:
        return f"a job holds it: {guest.job}"
    if policy.evacuation.strategy.stops:
        return _unstoppable(guest, policy.evacuation.strategy)
    return fixed(guest)


def _unstoppable(guest: Guest, strategy: Strategy) -> str | None:
    """Why a guest cannot be stopped for a while; None: it can."""
    if not guest.persistent:
        return "it is not defined on its host: once stopped it would be gone"
    return tied(guest) if strategy is Strategy.SUSPEND else None


def _unswitchable(guest: Guest, look: Look, answers: Answers) -> str | None:
    """Why a protected guest cannot be switched to its standby; None: it can."""
    protected = answers.protected[guest.uuid]
    ready = any(
        one.uuid == guest.uuid and one.state is GuestState.STANDBY
        for other in answers.looks if other.host.name == protected.backup for one in other.guests
    )  # fmt: skip
    if look.host.name == protected.primary and ready:
        return None
    return (
        f"it is protected ({protected.job}), and {protected.backup} has no standby of it that is"
        " ready"
    )


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
        case TravelMethod.ANEW:  # it gets images of its own, after all that runs has left
            needs = replace(made.needs, storage=frozenset())
            return replace(made, needs=needs, priority=_LAST)
        case _:
            return made


def started(tenant: Tenant, guest: Guest) -> Tenant:
    """One that is off, as it is once it runs."""
    return replace(tenant, memory=Bytes(guest.memory + OVERHEAD), cpus=float(guest.vcpus))


def _needs(guest: Guest, host: str, policy: Policy, answers: Answers) -> Needs:
    taken = frozenset(
        (look.host.name, _ITSELF if one.uuid == guest.uuid else _NAMESAKE)
        for look in answers.looks if look.host.name != host for one in look.guests
        if (one.uuid == guest.uuid and one.state.is_active)
        or (one.uuid != guest.uuid and one.name == guest.name)
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
    """A file of that host that is surely the same elsewhere. Where a guest is started it is found
    out at once; one that is off would be missing its disk months later."""
    return f"{host}:{file} (must be seen)"


def _place(look: Look, answers: Answers, run: Evacuation) -> Place:
    name, facts = look.host.name, look.facts
    if facts is None:
        return Place(name=name, memory=Bytes(0), cpus=0.0, closed=look.error or "it says nothing")
    held = sum(
        one.memory + OVERHEAD for one in look.guests
        if one.state.is_active or one.state in _STAND
    )  # fmt: skip
    has = facts.networks | (look.links or frozenset())
    if look.links is None:  # libvirt decides, and preflight warns
        has |= frozenset(name for one in answers.looks for g in one.guests for name in networks(g))
    storage = {f"{name}:{file}" for guest in look.guests for file in all_files(guest)}
    for (source, target), found in answers.same.items():
        if target == name:  # of what is not known libvirt decides, and preflight warns
            theirs = {file for guest in answers.look(source).guests for file in all_files(guest)}
            storage |= {f"{source}:{file}" for file in theirs if found.get(file, True)}
            storage |= {_seen_there(source, file) for file in theirs if found.get(file)}
    return Place(
        # What guests were promised may not all be taken yet: no more than there is.
        name=name, memory=Bytes(min(facts.memory, held + facts.memory_free)),
        cpus=facts.cpus * run.cpu_overcommit, offers=answers.fits.get(name, frozenset()),
        machines=facts.machines, networks=has, storage=frozenset(storage),
        labels=look.host.labels, closed=answers.closed.get(name),
        link=UNKNOWN_LINK,
    )  # fmt: skip
