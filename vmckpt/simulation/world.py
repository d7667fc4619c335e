"""Events in a simulated fleet: repeated migrations, evacuations and protections. Pure.

The course depends only on the seed, the time, and the commands that are started.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vmckpt.errors import BadInput, Blocked, GuestLocked
from vmckpt.evacuation.task import Kind, Task
from vmckpt.journal.jobs import JobDetail, JobView
from vmckpt.journal.records import MAINTENANCE, RequestKind, StoredEvent
from vmckpt.journal.serialization import as_record
from vmckpt.migration.run.actions import Action
from vmckpt.model.events import Decided
from vmckpt.model.guest import FleetNow, GuestNow, GuestState
from vmckpt.model.migration import Decision, Outcome
from vmckpt.simulation import fleet as fleets
from vmckpt.simulation import migrations as moves
from vmckpt.simulation.fleet import (
    Manner,
    SimulatedProtection,
    Site,
    held,
    operation,
    over,
    protection,
)
from vmckpt.simulation.migrations import Made, Move
from vmckpt.units import GIB, Bytes, Seconds, show_seconds

_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"
_BEFORE = 240.0
"""Seconds that are simulated before the first query."""
_MANNERS = (
    fleets.QUIET, fleets.BUSY, fleets.STUBBORN, fleets.QUIET, fleets.FAR, fleets.BUSY,
)  # fmt: skip
_AT_ONCE = 2  # guests that leave a host at the same time
_KEPT = 500  # jobs that have ended
_EMPTIES_SINCE, _REST = 25.0, 12.0
_HOSTS, _FEW = 3, 16
"""Hosts are evacuated only in a fleet of at least `_HOSTS` hosts. A host is evacuated only if it
has at most `_FEW` running guests."""
_TURN, _FULL = "its turn", "no host has room for it"
_ANSWERS = {
    RequestKind.CANCEL: "no new moves start; running moves finish",
    RequestKind.PAUSE: "paused: no new moves start until the run is resumed",
    RequestKind.GO_ON: "resumed",
}


@dataclass(slots=True)
class Emptying:
    """An evacuation in progress."""

    id: str
    host: str
    began: float
    waiting: list[Made]
    detail: dict[str, Any]
    running: set[str] = field(default_factory=set)
    moved: list[dict[str, Any]] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)
    told: list[Decision] = field(default_factory=list)
    paused: bool = False
    stopped: bool = False

    def tell(self, at: float, action: str, reason: str, rule: str = "evacuate") -> None:
        since = Seconds(at - self.began)
        self.told.append(Decision(at=since, action=action, reason=reason, rule=rule))

    def begins(self, made: Made, at: float) -> None:
        self.running.add(made.move.id)
        self.tell(at, f"{made.move.guest.name} → {made.move.target}", "begins")

    def came(self, made: Made) -> None:
        """Record that a migration of this evacuation has ended, with any outcome."""
        move, took = made.move, Seconds(made.course.ends)
        self.running.discard(move.id)
        action = f"{move.guest.name} → {move.target}"
        if made.course.outcome is not Outcome.COMPLETED:
            self.tell(made.ends, action, f"failed: {made.course.outcome}")
            hint = f"see {move.id} in the list of jobs"
            self.left.append(_left(move.guest, str(made.course.outcome), hint))
            return
        pause = made.course.downtime
        self.moved.append({
            "guest": move.guest.name, "guest_uuid": move.guest.uuid, "from": self.host,
            "to": move.target, "job": move.id, "took_ms": round(took * 1000, 1),
            "downtime_ms": None if pause is None else round(pause * 1000, 1),
        })  # fmt: skip
        count = len(self.moved)
        of = count + len(self.running) + len(self.waiting) + len(self.left)
        self.tell(made.ends, action, f"moved in {show_seconds(took)}; {count} of {of}")

    def view(self) -> JobView:
        one = operation(
            self.id, "evacuate", self.host, self.began, source=self.host, policy="maintenance",
            detail=self.detail,
        )  # fmt: skip
        return JobView(operation=one, attended=True, sample=None)

    def report(self, at: float) -> dict[str, Any]:
        """Return the report as JSON, as `vmckpt evacuate` prints it at the end."""
        outcome = Outcome.CANCELLED if self.stopped else Outcome.FAILED
        return {
            "job": self.id, "kind": "evacuate", "host": self.host,
            "outcome": str(outcome if self.left else Outcome.COMPLETED), "moved": self.moved,
            "shut_down": [], "suspended": [], "started": [], "left": self.left,
            "stopped": self.stopped, "total_ms": round((at - self.began) * 1000, 1),
        }  # fmt: skip

    def detail_of(self, view: JobView) -> JobDetail:
        records = [as_record(Decided(decision=one), Seconds(0.0), one.at) for one in self.told]
        events = [
            StoredEvent(seq=number, at=one.at, kind=one.kind, values=one.values)
            for number, one in enumerate(records, 1)
        ]
        return JobDetail(view=view, forecast=None, events=events, samples=(), requests=())


def _plan(host: str, leaving: Sequence[Made]) -> dict[str, Any]:
    """Return the details that an evacuation's job has in the journal."""
    lanes = [0.0] * _AT_ONCE
    told: list[dict[str, Any]] = []
    for one in leaving:
        lane = lanes.index(min(lanes))
        begins, lanes[lane] = lanes[lane], lanes[lane] + one.course.ends
        told.append({
            "guest": one.move.guest.name, "from": host, "to": one.move.target,
            "begins_ms": round(begins * 1000, 1), "ends_ms": round(lanes[lane] * 1000, 1),
        })  # fmt: skip
    took = max(lanes) * 1000
    return {
        "task": Task(kind=Kind.EVACUATE, host=host).as_json(), "moves": told, "left": [],
        "expected_ms": [round(took * 0.85, 1), round(took * 1.3, 1)],
    }  # fmt: skip


def _left(guest: GuestNow, why: str, hint: str) -> dict[str, Any]:
    return {"guest": guest.name, "on": guest.host, "why": why, "hint": hint, "mend": hint}


def _switched(one: Made, now: float) -> bool:
    """Return whether a guest is running on the target before its migration has ended."""
    switched = one.course.switched
    return switched is not None and now - one.move.began >= switched


class World:
    """The state of a simulated fleet and its jobs; `to` advances it to a time."""

    def __init__(self, fleet: FleetNow, jobs: int, seed: int) -> None:
        now = fleet.at
        self.site, self._seed, self._number = Site(fleet), seed, 0
        self.moves: dict[str, Made] = {}
        self.empties: dict[str, Emptying] = {}
        self.guarded: dict[str, SimulatedProtection] = {}
        self.held = {
            one.name: held(one.name, fleets.HELD, now - 86400.0, "new DIMMs")
            for one in fleet.hosts if one.closed is not None
        }  # fmt: skip
        self.past: dict[str, Made | JobDetail] = {}
        self._busy: set[str] = set()
        self._loops: set[str] = set()
        self._due: list[tuple[float, int, str]] = []
        self._protect(now)
        for number in range(jobs):
            self._later(now - _BEFORE + 11.0 * number % 60, "move")
        self._later(now - _EMPTIES_SINCE, "evacuate")
        self.to(now)

    def to(self, now: float) -> None:
        """Simulate everything that begins or ends until `now`, in order."""
        while True:
            first = min(self.moves.values(), key=lambda one: one.ends, default=None)
            ends = float("inf") if first is None else first.ends
            if first is not None and ends <= now and (not self._due or ends <= self._due[0][0]):
                self._ended(first)
            elif self._due and self._due[0][0] <= now:
                at, _, what = heapq.heappop(self._due)
                if not (self._begin(at) if what == "move" else self._empty(at)):
                    self._later(at + 20.0, what)
            else:
                return

    def _later(self, at: float, what: str) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, what))

    def _dice(self) -> random.Random:
        self._number += 1
        return random.Random(f"{self._seed} {self._number}")

    def _id(self, kind: str) -> str:
        return f"{kind[0]}-{''.join(self._dice().choices(_LETTERS, k=5))}"

    def fleet(self, now: float) -> FleetNow:
        """Return the fleet; a migrating guest is on both hosts, as with real hosts."""
        there = tuple((id_, _switched(one, now)) for id_, one in self.moves.items())
        return self.site.fleet(now, (there, tuple(self.guarded)), self._elsewhere(now))

    def _elsewhere(self, now: float) -> Iterator[GuestNow]:
        for one in self.moves.values():
            guest, there = one.move.guest, _switched(one, now)
            state = guest.state if there else GuestState.PAUSED
            yield replace(guest, host=one.move.target, state=state)
            if there:
                yield replace(guest, state=GuestState.PAUSED)
        for known in self.guarded.values():
            yield replace(known.guest, host=known.backup, state=GuestState.STANDBY)

    def active(self, now: float) -> list[JobView]:
        """Return all running jobs, the latest first."""
        found = [one.view(now) for one in self.moves.values()]
        found += [one.view() for one in self.empties.values()]
        agents = [*map(protection, self.guarded.values()), *self.held.values()]
        found += [JobView(operation=one, attended=True, sample=None) for one in agents]
        return sorted(found, key=lambda one: -one.operation.began_at)

    def _begin(self, at: float) -> bool:
        """Begin the next of the repeated migrations. Returns whether a migration has begun."""
        dice, manner = self._dice(), _MANNERS[len(self._loops) % len(_MANNERS)]
        most = Bytes((4 if manner is fleets.FAR else 32) * GIB)
        guest = self.site.anyone(dice, self._busy, most)
        target = None if guest is None else self.site.room(dice, guest)
        if guest is None or target is None:
            return False
        self._loops.add(self._go(self.made(guest, target, manner, at)).move.id)
        return True

    def made(
        self, guest: GuestNow, target: str, manner: Manner, at: float, *, part_of: str | None = None
    ) -> Made:
        """Return a simulated migration, without starting it."""
        id_ = self._id("migrate")
        return moves.simulate(Move(id_, guest, target, manner, at, part_of))

    def start(self, made: Made) -> str:
        """Start a migration. Returns its ID. Raises GuestLocked, Blocked."""
        move = made.move
        if move.guest.name in self._busy:
            raise GuestLocked(f"{move.guest.name} already has a job", hint="see the list of jobs")
        if (why := self.site.why_not(move.guest, move.target)) is not None:
            refused = f"{move.guest.name} cannot move to {move.target}: {why}; nothing was changed"
            raise Blocked(refused, hint="choose another host")
        return self._go(made).move.id

    def _go(self, made: Made) -> Made:
        self.moves[made.move.id] = made
        self._busy.add(made.move.guest.name)
        self.site.take(made.move.target, made.move.guest.memory)
        return made

    def ask(self, id_: str, now: float, kind: RequestKind, action: Action) -> None:
        """Send a request to a migration. Raises BadInput if the migration refuses it."""
        self.moves[id_] = moves.ask(self.moves[id_], now, kind, action)

    def _ended(self, made: Made) -> None:
        move = made.move
        del self.moves[move.id]
        self._busy.discard(move.guest.name)
        if made.course.outcome is Outcome.COMPLETED:
            self.site.put(move.guest.name, move.target)
        else:
            self.site.take(move.target, -move.guest.memory)
        self._keep(move.id, made)
        if move.id in self._loops:
            self._later(made.ends + self._dice().uniform(2.0, 6.0), "move")
        if (one := self.empties.get(move.part_of or "")) is not None:
            one.came(made)
            self._fill(one, made.ends)

    def _keep(self, id_: str, what: Made | JobDetail) -> None:
        self.past[id_] = what
        if len(self.past) > _KEPT:
            del self.past[next(iter(self.past))]

    def _empty(self, at: float) -> bool:
        """Begin the next evacuation, unless one is in progress. Returns whether it has begun."""
        if self.empties or len(self.site.hosts) < _HOSTS:
            return False
        for host in [name for name, one in self.held.items() if one.detail["why"] == _TURN]:
            del self.held[host]
            self.site.close(host, None)
        guests = self.site.guests.values()
        guarded = {host for one in self.guarded.values() for host in (one.guest.host, one.backup)}
        running = Counter(one.host for one in guests if one.state is GuestState.RUNNING)
        fits = [
            name for name, count in running.items()
            if count <= _FEW and self.site.hosts[name].closed is None and name not in guarded
        ]  # fmt: skip
        if fits:
            self.empty(self._dice().choice(fits), at, _TURN)
        return bool(fits)

    def leaving(self, host: str, at: float, id_: str | None = None) -> list[Made]:
        """Return the migrations that would empty a host, the longest first.

        Shut-off or busy guests, and guests for which no host has room, are not included.
        """
        found = []
        for guest in self.site.on(host):
            free = guest.state.is_active and guest.name not in self._busy
            target = self.site.room(self._dice(), guest) if free else None
            if target is not None:
                found.append(self.made(guest, target, fleets.EVACUATED, at, part_of=id_))
        return sorted(found, key=lambda one: -one.course.ends)

    def empty(self, host: str, at: float, why: str) -> Emptying:
        """Begin to evacuate a host. Raises Blocked."""
        if (known := self.site.hosts[host]).error or host in self.held:
            raise Blocked(f"{host}: {known.error or known.closed}", hint="see the list of hosts")
        id_, job = self._id("evacuate"), self._id(MAINTENANCE)
        self.held[host] = held(host, job, at, why)
        self.site.close(host, f"it is in maintenance ({job}, {fleets.WHO}: {why})")
        waiting = self.leaving(host, at, id_)
        one = Emptying(id=id_, host=host, began=at, waiting=waiting, detail=_plan(host, waiting))
        self._others(one)
        self._busy |= {made.move.guest.name for made in waiting}
        self.empties[id_] = one
        self._fill(one, at)
        return one

    def _others(self, one: Emptying) -> None:
        """Handle the guests that do not migrate: move shut-off guests to another host.

        Busy guests, and guests for which no host has room, stay and are reported as left.
        """
        going = {made.move.guest.name for made in one.waiting}
        for guest in self.site.on(one.host):
            if guest.name in self._busy:
                one.left.append(_left(guest, "it already has a job", "see the list of jobs"))
            elif guest.name not in going:
                target = self.site.room(self._dice(), guest)
                if target is None:
                    one.left.append(_left(guest, _FULL, "free up memory on another host"))
                elif not guest.state.is_active:
                    self.site.put(guest.name, target)

    def order(self, id_: str, now: float, kind: RequestKind) -> str:
        """Stop, pause or resume an evacuation. Returns the answer. Raises BadInput."""
        one = self.empties[id_]
        if kind not in _ANSWERS:
            raise BadInput(
                f"{id_} refused {kind}: send this request to the migration job of one guest"
            )
        if kind is RequestKind.CANCEL:
            one.stopped = True
        else:
            one.paused = kind is RequestKind.PAUSE
        one.tell(now, "evacuate", _ANSWERS[kind], "operator")
        self._fill(one, now)
        return _ANSWERS[kind]

    def _fill(self, one: Emptying, at: float) -> None:
        """Begin as many migrations as may run at once. If none is left, end the evacuation."""
        while one.waiting and not (one.paused or one.stopped) and len(one.running) < _AT_ONCE:
            made = one.waiting.pop(0)
            move = made.move
            self._busy.discard(move.guest.name)
            if self.site.why_not(move.guest, move.target) is not None:
                if (target := self.site.room(self._dice(), move.guest)) is None:
                    one.left.append(_left(move.guest, _FULL, "free up memory on another host"))
                    continue
                made = moves.simulate(replace(move, target=target))
            self._go(replace(made, move=replace(made.move, began=at)))
            one.begins(made, at)
        if one.running or (one.waiting and not one.stopped):
            return
        for made in one.waiting:
            self._busy.discard(made.move.guest.name)
            hint = f"evacuate {one.host} again"
            one.left.append(
                _left(made.move.guest, "the run stopped before the guest was moved", hint)
            )
        del self.empties[one.id]
        report = one.report(at)
        self._keep(one.id, one.detail_of(over(one.view().operation, report["outcome"], at, report)))
        if self.held[one.host].detail["why"] == _TURN:
            self._later(at + _REST, "evacuate")

    def _protect(self, now: float) -> None:
        """Begin up to two protections; the link to the second standby is slow."""
        for far in (False, True):
            dice = self._dice()
            guest = self.site.anyone(dice, self._busy, Bytes(16 * GIB))
            backup = None if guest is None else self.site.room(dice, guest)
            if guest is not None and backup is not None:
                job = self._id("protect")
                self.guarded[job] = SimulatedProtection(
                    job=job, guest=guest, backup=backup, began=now - (610.0 if far else 5400.0),
                    automatic=not far, far=far,
                )  # fmt: skip
                self._busy.add(guest.name)
                self.site.take(backup, guest.memory)

    def unguard(self, job: str, now: float, *, failover: bool) -> str:
        """End a protection, with or without a failover. Returns the host of the guest."""
        one = self.guarded.pop(job)
        self._busy.discard(one.guest.name)
        runs_on = one.backup if failover else one.guest.host
        report: dict[str, Any]
        if failover:
            self.site.put(one.guest.name, one.backup)
            report = {"failed_over": one.backup, "why": "requested by an operator, in a simulation"}
        else:
            self.site.take(one.backup, -one.guest.memory)
            report = {"unprotected": True, "runs_on": runs_on}
        view = over(protection(one), Outcome.COMPLETED, now, report)
        self._keep(job, JobDetail(view=view, forecast=None, events=(), samples=(), requests=()))
        return runs_on
