"""A simulated fleet: its hosts, guests and snapshots, and records of jobs. Pure.

The same seed gives the same fleet. No real host is involved, and all names are invented.
"""

import base64
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import MAINTENANCE, ControllerIdentity, Operation, State
from vmckpt.migration.run.actions import Action, SetThrottle, SwitchToPostcopy
from vmckpt.model.guest import FleetNow, GuestNow, GuestState, HostNow, SnapshotNow
from vmckpt.model.migration import AutoConverge, Mode
from vmckpt.protection.request import Judge
from vmckpt.units import GIB, MIB, Bytes, Seconds

WHO = "ops@desk1"
HELD = "m-m8n7"
"""The ID of the job for the host in maintenance."""
MOST_HOSTS, MOST_GUESTS = 10_000, 200_000
_FLEET = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")
_RACK = 12
"""Number of hosts in a rack."""
_SOME = 6
"""With at least this many hosts, one host does not answer and another is in maintenance."""
_ROLES = ("web", "app", "db", "cache", "build", "queue", "mail", "proxy", "log", "test")
_SHARES = (30, 22, 12, 8, 8, 6, 3, 4, 4, 3)
_GIBS = (2, 4, 8, 16, 32, 64)
_GIB_SHARES = (20, 30, 26, 15, 7, 2)
_STATES = (GuestState.RUNNING, GuestState.PAUSED, GuestState.SHUT_OFF)
_STATE_SHARES = (93, 2, 5)
_HOST_GIBS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_ROOM = 1.4
"""Memory of a rack's hosts, relative to the memory of guests on the rack's fullest host."""
_OWN = 0.04
"""Share of a host's memory that the host itself uses."""
_PAGE = 4096


def parsed(text: str) -> tuple[int, int]:
    """Parse the numbers of hosts and guests, like "24x300". Raises BadInput."""
    found = _FLEET.fullmatch(text.strip()) if len(text) <= 40 else None
    if found is None:
        raise BadInput(
            f"{text[:40]!r} is not a valid fleet size",
            hint="use a value like 24x300: 24 hosts, 300 guests",
        )
    hosts, guests = int(found[1]), int(found[2])
    if hosts > MOST_HOSTS or guests > MOST_GUESTS:
        raise BadInput(
            f"a fleet of {hosts} hosts and {guests} guests is too large",
            hint=f"use at most {MOST_HOSTS}x{MOST_GUESTS}",
        )
    if guests and not hosts:
        raise BadInput(f"{guests} guests have no host", hint=f"use 1x{guests}, or 0x0")
    return hosts, guests


def made(hosts: int, guests: int, seed: int, at: float = 0.0) -> FleetNow:
    """Return the initial state of the fleet. `at`: the time, in seconds since 1970."""
    dice = random.Random(f"fleet {seed}")
    names = [f"r{1 + number // _RACK:02}-n{1 + number % _RACK:02}" for number in range(hosts)]
    silent, closed = (hosts // 3, 2 * hosts // 3) if hosts >= _SOME else (None, None)
    homes = [name for number, name in enumerate(names) if number not in (silent, closed)]
    found = tuple(_guests(guests, homes, dice))
    used = dict.fromkeys(names, 0)
    for one in found:
        used[one.host] += one.memory if one.state.is_active else 0
    sizes = {
        names[first] : _size(max(used[name] for name in names[first : first + _RACK]))
        for first in range(0, hosts, _RACK)
    }  # fmt: skip
    told = []
    for number, name in enumerate(names):
        labels = _labels(rack=name[:-4], site="north" if number < hosts / 2 else "south")
        if number == silent:
            error = f"{name}: libvirt connection: no answer within 5 s"
            told.append(HostNow(name=name, error=error, labels=labels))
            continue
        memory = sizes[names[number - number % _RACK]]
        host = HostNow(
            name=name, cpus=64 if memory <= 512 * GIB else 128, memory=memory,
            busy=min(0.97, used[name] / memory * dice.uniform(0.4, 1.4)),
            free=Bytes(round(memory * (1 - _OWN - dice.random() / 50)) - used[name]),
            closed=f"it is in maintenance ({HELD}, {WHO}: new DIMMs)"
            if number == closed else None,
            labels=labels,
        )  # fmt: skip
        told.append(host)
    return FleetNow(at=at, hosts=tuple(told), guests=found)


def _guests(count: int, homes: Sequence[str], dice: random.Random) -> Iterator[GuestNow]:
    roles = dice.choices(_ROLES, _SHARES, k=count)
    sizes = dice.choices(_GIBS, _GIB_SHARES, k=count)
    states = dice.choices(_STATES, _STATE_SHARES, k=count)
    where = dice.choices(homes, k=count) if count else []
    numbers = dict.fromkeys(_ROLES, 0)
    labels: dict[tuple[str, int], Mapping[str, str]] = {}
    for role, gibs, state, host in zip(roles, sizes, states, where, strict=True):
        numbers[role] += 1
        key = role, 1 + (numbers[role] - 1) // 4
        if key not in labels:
            labels[key] = _labels(role=role, cluster=f"{role}-{key[1]}")
        yield GuestNow(
            name=f"{role}-{numbers[role]:03}", uuid=_uuid(dice), host=host, state=state,
            memory=Bytes(gibs * GIB), vcpus=max(1, min(16, gibs // 2)), labels=labels[key],
        )  # fmt: skip


def _labels(**labels: str) -> Mapping[str, str]:
    return MappingProxyType(labels)


def _uuid(dice: random.Random) -> str:
    text = f"{dice.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def _size(used: int) -> Bytes:
    """Return the memory size of a rack's hosts. `used`: bytes in use on the fullest host."""
    needed = used * _ROOM / GIB
    sizes = [one for one in _HOST_GIBS if one >= needed and one >= _HOST_GIBS[2]]
    return Bytes((sizes[0] if sizes else 1 << int(needed).bit_length()) * GIB)


class Site:
    """The current host of each guest, and the free memory of each host."""

    def __init__(self, fleet: FleetNow) -> None:
        self.hosts = {one.name: one for one in fleet.hosts}
        self.guests = {one.name: one for one in fleet.guests}
        self._names = list(self.guests)
        self._told: FleetNow | None = None
        self._told_for: object = None

    def fleet(self, at: float, key: object, others: Iterable[GuestNow]) -> FleetNow:
        """Return the fleet as the dashboard shows it.

        `others`: further guests, which replace the same guest on the same host. `others` is read
        only if `key` or something in the site has changed.
        """
        if self._told is None or key != self._told_for:
            found = {(one.name, one.host): one for one in others}
            guests = tuple(
                self.guests.values() if not found else
                (found.pop((one.name, one.host), one) for one in self.guests.values())
            )  # fmt: skip
            guests += tuple(found.values())
            self._told = FleetNow(at=at, hosts=tuple(self.hosts.values()), guests=guests)
            self._told_for = key
        elif at != self._told.at:
            self._told = replace(self._told, at=at)
        return self._told

    def take(self, host: str, memory: int) -> None:
        """Reserve memory on a host; a negative size releases memory."""
        was = self.hosts[host]
        self.hosts[host] = replace(was, free=Bytes(was.free - memory))
        self._told = None

    def put(self, guest: str, host: str) -> None:
        """Move a guest to a host on which its memory was already reserved."""
        was = self.guests[guest]
        self.guests[guest] = replace(was, host=host)
        self.take(was.host, -was.memory if was.state.is_active else 0)

    def close(self, host: str, why: str | None) -> None:
        """Close a host to new guests. `why`: the reason; None: open the host again."""
        self.hosts[host] = replace(self.hosts[host], closed=why)
        self._told = None

    def on(self, host: str) -> list[GuestNow]:
        return [one for one in self.guests.values() if one.host == host]

    def anyone(
        self, dice: random.Random, busy: Iterable[str], most: Bytes = Bytes(1 << 60)
    ) -> GuestNow | None:
        """Return a random running guest that is not busy and has at most `most` bytes, or None.

        Only some guests are tried.
        """
        for _ in range(min(60, 3 * len(self._names))):
            one = self.guests[dice.choice(self._names)]
            if one.state is GuestState.RUNNING and one.name not in busy and one.memory <= most:
                return one
        return None

    def room(self, dice: random.Random, guest: GuestNow) -> str | None:
        """Return a random host with room for a guest, or None. Only some hosts are tried."""
        names = list(self.hosts)
        tried = dice.sample(names, min(24, len(names)))
        fits = [one for one in tried if self.why_not(guest, one) is None]
        fits = sorted(fits, key=lambda name: -self.hosts[name].free)[:5]
        return dice.choice(fits) if fits else None

    def why_not(self, guest: GuestNow, target: str) -> str | None:
        """Return why a guest cannot move to a host, or None if it can."""
        host = self.hosts[target]
        if guest.host == target:
            return f"already on {target}"
        if (why := host.error or host.closed) is not None:
            return why
        needs = guest.memory if guest.state.is_active else 0
        return None if host.free >= needs else f"{target} has no room for {guest.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a guest and its policy behave in a migration; values are drawn from the ranges."""

    policy: str = "balanced"
    mode: Mode = Mode.HYBRID
    max_downtime: Seconds = Seconds(0.3)
    first: tuple[float, float] = (14.0, 30.0)
    """Duration of the first pass over memory, in seconds, if the link allows it."""
    link: tuple[float, float] = (110.0 * MIB, 2900.0 * MIB)
    hot: tuple[float, float] = (0.08, 0.15)
    """Share of the guest's used memory that it writes to repeatedly."""
    writes: tuple[float, float] = (0.5, 0.75)
    """Rate of these writes, as a share of the bandwidth."""
    stalled: Action = field(default_factory=SwitchToPostcopy)
    rule: str = "stalled"
    patience: Seconds = Seconds(10.0)

    def bandwidth(self, in_use: float, dice: random.Random) -> float:
        """Draw a bandwidth, in bytes per second. `in_use`: memory that the guest uses, in bytes."""
        least, most = self.link
        return min(most, max(least, in_use / dice.uniform(*self.first)))


QUIET, EVACUATED = Manner(), Manner(policy="maintenance", first=(6.0, 16.0))
BUSY = Manner(policy="databases", hot=(0.3, 0.4), writes=(1.8, 2.4), first=(10.0, 20.0))
STUBBORN = Manner(
    policy="batch", mode=Mode.PRECOPY, max_downtime=Seconds(0.15), hot=(0.15, 0.25),
    writes=(1.6, 1.9), stalled=SetThrottle(AutoConverge(initial=20, increment=10, at_most=60)),
    rule="slow the guest down",
)  # fmt: skip
FAR = Manner(
    policy="wan", max_downtime=Seconds(1.0), first=(40.0, 60.0), link=(20e6, 50e6),
    hot=(0.06, 0.1),
)  # fmt: skip


def snapshots(guests: Sequence[GuestNow], seed: int, now: float) -> tuple[SnapshotNow, ...]:
    """Return twenty snapshots of the first three guests, or fewer of fewer guests, oldest first.

    One snapshot is pinned, and one is damaged.
    """
    dice = random.Random(f"snapshots {seed}")
    group = _id(dice, "g")
    found: list[SnapshotNow] = []
    for count, guest in zip((8, 7, 5), guests[:3], strict=False):
        parent: str | None = None
        for number in range(count):
            made_at = round(now - 86400.0 * (count - number) + dice.uniform(0, 3600))
            whole = round(guest.memory * 0.6) // _PAGE * _PAGE
            last = number == count - 1
            one = SnapshotNow(
                id=_id(dice, "s"), name="before-upgrade" if last else f"daily-{number + 1}",
                store="vault", guest=guest.name, guest_uuid=guest.uuid, made_at=float(made_at),
                memory=Bytes(whole), disks=Bytes(round(guest.memory * 2.5)),
                new=Bytes(round(whole * (1.0 if parent is None else dice.uniform(0.02, 0.15)))),
                parent=parent, group=group if last else None,
                schedule=None if last else "daily", verified="never" if last else "good (deep)",
                verified_at=None if last else min(now, made_at + 7200.0),
            )  # fmt: skip
            parent = one.id
            found.append(one)
    if found:
        found[0] = replace(found[0], pinned=True)
        found[3] = replace(
            found[3], verified="bad (deep)", damaged=True,
            wrong="2 of its 18,412 chunks damaged or missing",
        )  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.made_at))


def _id(dice: random.Random, letter: str) -> str:
    return f"{letter}-{base64.b32encode(dice.randbytes(10)).decode().lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProtection:
    """A simulated protection."""

    job: str
    guest: GuestNow
    backup: str
    began: float
    automatic: bool
    far: bool
    """Its link is slow, so the standby must be copied again every few minutes."""


_CYCLE, _COPYING = Seconds(180.0), Seconds(45.0)


def job_status(one: SimulatedProtection, now: float) -> dict[str, Any]:
    """Return the protection's status, in the form of app.protection.job_status."""
    since = now - one.began
    copying = one.far and since % _CYCLE < _COPYING
    ours = _copying(one, since % _CYCLE) if copying else _protecting(one, since)
    ours |= {
        "role": "primary", "name": one.guest.name, "guest": one.guest.uuid, "peer": one.backup,
        "host": one.guest.host, "runs": True, "agent": True,
    }  # fmt: skip
    says = "synchronising with the primary" if copying else "following the guest"
    theirs = {
        "role": "backup", "name": one.guest.name, "guest": one.guest.uuid, "host": one.backup,
        "peer": one.guest.host, "runs": True, "agent": True, "phase": "waiting",
        "committed": ours.get("epoch", 0), "ready": not copying, "silent_s": 0.1,
        "connected": True, "received": ours["sent"], "says": says,
        "epoch_age_s": ours.get("rpo_s"),
    }  # fmt: skip
    return {
        "guest": one.guest.name, "uuid": one.guest.uuid, "job": one.job,
        "primary": one.guest.host, "backup": one.backup, "automatic": one.automatic,
        "judge": Judge.LEASE if one.automatic else Judge.PERSON,
        "standby": {"ready": not copying, "why": says},
        "says": {one.guest.host: ours, one.backup: theirs},
    }  # fmt: skip


def _copying(one: SimulatedProtection, since: float) -> dict[str, Any]:
    left = 1 - since / _COPYING
    return {
        "phase": "copying", "pages_left": round(one.guest.memory * left) // _PAGE,
        "disks_ready": left < 0.5, "disks_bytes": 2 * one.guest.memory,
        "disks_compared_bytes": round(2 * one.guest.memory * min(1.0, 2 - 2 * left)),
        "disks_sent_bytes": round(one.guest.memory * (1 - left) / 8),
        "rpo_s": None, "rpo_worst_s": 0.0, "guest_stood_still_s": 0.0, "protected_for_s": since,
        "guest_clock_behind_s": 0.0, "guest_clock_corrected": None, "packets_lost": 0,
        "sent": round(one.guest.memory * (1 - left)),
    }  # fmt: skip


def _protecting(one: SimulatedProtection, since: float) -> dict[str, Any]:
    dice = random.Random(f"{one.job} {int(since)}")
    interval = 4.2 if one.far else 0.16
    pause = (0.055 if one.far else 0.013) * dice.uniform(0.85, 1.15)
    pages = round((42_000 if one.far else 2_900) * dice.uniform(0.7, 1.3))
    busy = interval / 1.25 * dice.uniform(0.9, 1.0)
    cycle = {
        "pause_s": pause, "busy_s": busy, "send_s": busy * 0.8, "bytes": pages * 4200,
        "pages": pages, "packets": dice.randrange(1, 40), "pause_stop_s": pause * 0.1,
        "pause_device_state_s": pause * 0.45, "pause_output_s": pause * 0.05,
        "pause_changed_pages_s": pause * 0.33, "pause_cont_s": pause * 0.07,
    }  # fmt: skip
    epoch = int(since / interval)
    why = "an epoch of 168 MiB took 3.5 s: 4.2 s" if one.far else "12 packets waited, and pauses"
    return {
        "phase": "protecting", "epoch": epoch, "finder": "compare",
        "finder_why": "it works on every host",
        "interval_s": interval,
        "interval_why": why if one.far else f"{why} of 13 ms may take 10 % of the time: 160 ms",
        "rpo_s": busy + since % interval, "rpo_worst_s": busy + 2.3 * interval,
        "guest_stood_still_s": epoch * 0.013, "protected_for_s": since,
        "guest_clock_behind_s": 0.02, "guest_clock_corrected": int(since / 60),
        "disks_bytes": 2 * one.guest.memory, "disks_compared_bytes": 2 * one.guest.memory,
        "disks_sent_bytes": one.guest.memory // 8, "disks_ready": True, "pages_left": 0,
        "standby": {"ready": True, "phase": "waiting", "committed": epoch},
        "sent": epoch * 12_000_000, "packets_lost": 7 if one.far else 0,
        "median": cycle, "last": cycle, "recent": [{"pause_s": pause, "busy_s": busy}],
        "pause_p99_s": pause * 1.9, "output_delay_s": interval / 2 + pause + busy,
        "output_delay_worst_s": interval * 2.3,
    }  # fmt: skip


def operation(id_: str, kind: str, guest: str, began: float, **more: Any) -> Operation:
    """Return a running job. `more`: further fields of Operation."""
    known: dict[str, Any] = dict.fromkeys(
        ("guest_uuid", "source", "target", "policy", "mode", "phase", "outcome", "asked_from",
         "ended_at", "report")
    )  # fmt: skip
    controller = ControllerIdentity(host="desk1", boot="simulated", pid=4321, started=1)
    known |= {"state": "running", "asked_by": WHO, "controller": controller, "detail": {}, **more}
    return Operation(id=id_, kind=kind, guest=guest, began_at=began, **known)


def over(one: Operation, outcome: str, at: float, report_: Mapping[str, Any]) -> JobView:
    """Return a job that has ended."""
    ended = replace(one, state=State.ENDED, outcome=str(outcome), ended_at=at, report=report_)
    return JobView(operation=ended, attended=None, sample=None)


def held(host: str, id_: str, since: float, why: str) -> Operation:
    """Return the job of a host in maintenance."""
    by = ControllerIdentity(host="the journal", boot="", pid=0, started=0)
    return operation(id_, MAINTENANCE, host, since, source=host, detail={"why": why}, controller=by)


def protection(one: SimulatedProtection) -> Operation:
    """Return a protection's job as the journal stores it."""
    return operation(
        one.job, "protect", one.guest.name, one.began, guest_uuid=one.guest.uuid,
        source=one.guest.host, target=one.backup, phase="protecting",
        controller=ControllerIdentity(host=one.guest.host, boot="", pid=0, started=0),
        detail={"automatic": one.automatic},
    )  # fmt: skip
