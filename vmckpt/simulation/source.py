"""A simulated fleet for the dashboard, including the commands that are started there.

The simulation replaces hosts, journal and agents. Nothing in it is real, and its commands do not
change any real guest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.errors import BadInput, VmckptError
from vmckpt.journal import queries
from vmckpt.journal.jobs import JobDetail, JobView, News
from vmckpt.journal.records import Operation, RequestKind
from vmckpt.migration.forecast.forecast import in_words
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    Stop,
    SwitchToPostcopy,
    says,
)
from vmckpt.model.events import Begun, Said
from vmckpt.model.guest import FleetNow, SnapshotNow
from vmckpt.model.migration import Mode, Outcome
from vmckpt.simulation import fleet as fleets
from vmckpt.simulation.fleet import Manner
from vmckpt.simulation.migrations import Made
from vmckpt.simulation.world import World
from vmckpt.units import parse_rate, parse_seconds, show_count, show_seconds

_ACTIONS: Mapping[str, tuple[RequestKind, Action]] = {
    "cancel": (RequestKind.CANCEL, Abort(Stop.OPERATOR)),
    "pause": (RequestKind.PAUSE, PauseGuest()),
    "postcopy": (RequestKind.POSTCOPY, SwitchToPostcopy()),
}
_FLAGS = (
    "yes", "dry-run", "json", "observe", "partly", "planned", "host-is-off", "fence", "test",
    "end-test", "lost-journal",
)  # fmt: skip
"""Options that have no value."""
_CODES = {Outcome.COMPLETED: 0, Outcome.CANCELLED: 130}
_FAILED = {"migrate": 20, "evacuate": 26}


@dataclass(slots=True)
class Acting:
    """A simulated command; see model.events.Begun. `says` returns its output so far."""

    words: tuple[str, ...]
    says: Callable[[], Said]
    stops: Callable[[], object] = lambda: None
    pid: int = 0

    def said(self) -> Said:
        return self.says()

    def stop(self) -> None:
        self.stops()


class Showing:
    """A data source with a simulated fleet, in which `jobs` guests are migrating at any time."""

    def __init__(
        self, hosts: int, guests: int, jobs: int = 3, seed: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.title = f"a simulation: {hosts} hosts, {guests} guests"
        self._clock = clock
        made = fleets.made(hosts, guests, seed, clock())
        self._world = World(made, jobs, seed)
        self._snapshots = fleets.snapshots(made.guests, seed, made.at)

    def _now(self) -> float:
        """Simulate everything up to the current time. Returns the current time."""
        now = self._clock()
        self._world.to(now)
        return now

    async def close(self) -> None:
        pass

    async def fleet(self) -> FleetNow:
        return self._world.fleet(self._now())

    async def jobs(self, ended: int) -> Sequence[JobView]:
        now = self._now()
        last = list(self._world.past.values())[-ended:] if ended else []
        late = [one.view(now) if isinstance(one, Made) else one.view for one in reversed(last)]
        return [*self._world.active(now), *late]

    async def job(self, id_: str) -> JobDetail:
        return self._job(id_)

    def _job(self, id_: str) -> JobDetail:
        now, world = self._now(), self._world
        if (known := world.moves.get(id_) or world.past.get(id_)) is not None:
            return known.detail(now) if isinstance(known, Made) else known
        if (emptied := world.empties.get(id_)) is not None:
            return emptied.detail_of(emptied.view())
        active = {one.operation.id: one for one in world.active(now)}
        if id_ not in active:
            raise queries.unknown(id_, [*active, *world.past])
        return JobDetail(view=active[id_], forecast=None, events=(), samples=(), requests=())

    async def news(self, id_: str, event: int, sample: int) -> News:
        now, world = self._now(), self._world
        one = world.moves.get(id_) or world.past.get(id_)
        if isinstance(one, Made):
            events, samples = one.events(now, event), one.samples(now, sample)
            return News(view=one.view(now), events=events, samples=samples)
        found = self._job(id_)
        return News(
            view=found.view, samples=(), events=[one for one in found.events if one.seq > event]
        )

    async def parts(self, id_: str) -> Sequence[JobView]:
        now = self._now()
        known = [*self._world.past.values(), *self._world.moves.values()]
        found = [one for one in known if isinstance(one, Made) and one.move.part_of == id_]
        return [one.view(now) for one in sorted(found, key=lambda one: one.move.began)]

    async def protections(self) -> Mapping[str, Mapping[str, Any]]:
        now = self._now()
        return {job: fleets.job_status(one, now) for job, one in self._world.guarded.items()}

    async def snapshots(self) -> Sequence[SnapshotNow]:
        return self._snapshots

    async def ask(self, words: Sequence[str], width: int) -> Said:
        """Run a command that changes nothing; see model.events.Commands."""
        del width
        try:
            return Said(text=f"in a simulation: {self._looks(words, self._now())}\n", code=0)
        except VmckptError as exc:
            return Said(text=f"{exc}\n", code=exc.exit_code)

    def start(self, words: Sequence[str], width: int) -> Begun:
        """Start a command; see model.events.Commands."""
        del width
        given = tuple(words)
        try:
            return self._acts(given, self._now())
        except VmckptError as exc:
            return at_once(given, str(exc), exc.exit_code)

    def _looks(self, words: Sequence[str], now: float) -> str:
        """Return what a command that changes nothing would print. Raises BadInput."""
        names, options = _parsed(words)
        match names:
            case ["plan" | "migrate", guest]:
                made = self._made(guest, options, now)
                move = made.move
                why = self._world.site.why_not(move.guest, move.target)
                line = f"{move.guest.name}: {move.guest.host} → {move.target}"
                fits = f"policy {move.manner.policy}\n{in_words(made.forecast)}"
                return f"{line}\n{fits if why is None else f'not possible: {why}'}"
            case ["evacuate", host]:
                leaving = self._world.leaving(self._host(host), now)
                lines = [
                    f"{one.move.guest.name} → {one.move.target}, {in_words(one.forecast)}"
                    for one in leaving
                ]
                count = show_count(len(leaving), "guest")
                return "\n".join([f"{count} would leave {host}", *lines])
            case _:
                return f"vmckpt {' '.join(words)} has nothing to show"

    def _acts(self, words: tuple[str, ...], now: float) -> Begun:
        names, options = _parsed(words)
        if "dry-run" in options:
            return at_once(words, f"in a simulation: {self._looks(words, now)}", 0)
        match names:
            case ["migrate", guest]:
                return self._follow(words, self._world.start(self._made(guest, options, now)))
            case ["evacuate", host]:
                one = self._world.empty(self._host(host), now, "evacuation")
                return self._follow(words, one.id)
            case ["set" | "cancel" | "pause" | "resume" | "postcopy" as what, job]:
                return at_once(words, self._order(what, job, options), 0)
            case ["failover" | "unprotect" as what, guest] if not {"test", "end-test"} & {*options}:
                return at_once(words, self._unguard(guest, now, failover=what == "failover"), 0)
            case _:
                return at_once(words, "not available in a simulation", 2)

    def _follow(self, words: tuple[str, ...], id_: str) -> Begun:
        """Return a command that lasts as long as its job."""
        return Acting(words, lambda: self._said(id_), lambda: self._cancel(id_))

    def _cancel(self, id_: str) -> None:
        with suppress(BadInput):  # the job has ended, or is in post-copy
            self._order("cancel", id_, {})

    def _said(self, id_: str) -> Said:
        try:
            found = self._job(id_)
        except BadInput:
            return Said(text=f"{id_} ended long ago\n", code=0)
        one, lines = found.view.operation, [f"in a simulation: {id_}, {found.view.doing}"]
        lines += [
            f"{show_seconds(event.at):>8} {event.values['action']}: {event.values['reason']}"
            for event in found.events if event.kind == "decided"
        ]  # fmt: skip
        code = None if one.active else _CODES.get(Outcome(one.outcome or ""), _FAILED[one.kind])
        return Said(text="\n".join([*lines, ""]), code=code)

    def _order(self, what: str, job: str, options: Mapping[str, str]) -> str:
        """Send a request to a running job. Returns the answer. Raises BadInput."""
        one, now = self._meant(job), self._now()
        if one.kind == "evacuate":
            kinds = {"resume": RequestKind.GO_ON, "set": RequestKind.BANDWIDTH}
            kind = _ACTIONS[what][0] if what in _ACTIONS else kinds[what]
            return f"{one.id}: {self._world.order(one.id, now, kind)}"
        if one.kind != "migrate":
            raise BadInput(f"{one.id}: a job of kind {one.kind} accepts no requests")
        wanted = [_ACTIONS[what]] if what in _ACTIONS else _settings(options)
        if not wanted or what == "resume":
            raise BadInput(f"{one.id}: there is nothing to {what}")
        for kind, action in wanted:
            self._world.ask(one.id, now, kind, action)
        return "\n".join(f"{one.id}: {says(action)}" for _, action in wanted)

    def _unguard(self, guest: str, now: float, *, failover: bool) -> str:
        for job, one in self._world.guarded.items():
            if guest in (one.guest.name, one.guest.uuid, job):
                runs_on = self._world.unguard(job, now, failover=failover)
                return f"{one.guest.name} is running on {runs_on}; {job} has ended"
        raise BadInput(
            f"{guest} is not protected", hint="choose a guest in the list of protections"
        )

    def _meant(self, name: str) -> Operation:
        """Return an active job by its ID, a prefix of its ID, or its guest. Raises BadInput."""
        active = [one.operation for one in self._world.active(self._now())]
        begun = [one for one in active if one.id.startswith(name.lower()) or one.guest == name]
        found = queries.choose(name, begun)
        if found is None:
            raise queries.unknown(name, [*(one.id for one in active), *(o.guest for o in active)])
        return found

    def _made(self, name: str, options: Mapping[str, str], now: float) -> Made:
        """Return the requested migration, without starting it. Raises BadInput."""
        guests = self._world.site.guests
        guest = guests.get(name) or next((g for g in guests.values() if g.uuid == name), None)
        if guest is None:
            raise BadInput(
                f"no guest {name!r} on any host", hint="choose a guest in the list of guests"
            )
        if not guest.state.is_active:
            raise BadInput(
                f"{guest.name} is {guest.state.in_words}",
                hint="choose a running guest for a migration",
            )
        return self._world.made(guest, self._host(options.get("to", "")), _manner(options), now)

    def _host(self, name: str) -> str:
        if name not in self._world.site.hosts:
            raise BadInput(f"no host {name!r}", hint="choose a host in the list of hosts")
        return name


def at_once(words: tuple[str, ...], text: str, code: int) -> Acting:
    """Return a command that has ended already."""
    said = Said(text=f"{text}\n", code=code)
    return Acting(words, lambda: said)


def _parsed(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into names, and long options without dashes; drop short options."""
    names: list[str] = []
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            names += [] if word.startswith("-") else [word]
            continue
        name, _, value = word.removeprefix("--").partition("=")
        options[name] = value or (next(rest, "") if name not in _FLAGS else "")
    return names, options


def _manner(options: Mapping[str, str]) -> Manner:
    """Return how a guest migrates with these command-line options. Raises BadInput."""
    manner = fleets.QUIET
    try:
        mode = Mode(options.get("mode", manner.mode))
    except ValueError as exc:
        raise BadInput(str(exc)) from exc
    for _, action in _settings(options):
        if isinstance(action, SetDowntime):
            manner = replace(manner, max_downtime=action.limit)
        elif isinstance(action, LimitBandwidth) and action.bandwidth is not None:
            manner = replace(manner, link=(1.0, float(action.bandwidth)))
    return replace(manner, mode=mode, policy=options.get("policy", manner.policy))


def _settings(options: Mapping[str, str]) -> list[tuple[RequestKind, Action]]:
    """Return the requests of `vmckpt set` with these options. Raises BadInput."""
    found: list[tuple[RequestKind, Action]] = []
    try:
        if (rate := options.get("bandwidth")) is not None:
            limit = None if rate == "unlimited" else parse_rate(rate)
            found.append((RequestKind.BANDWIDTH, LimitBandwidth(limit)))
        if (longest := options.get("max-downtime")) is not None:
            limit_ = SetDowntime(parse_seconds(longest))
            found.append((RequestKind.MAX_DOWNTIME, limit_))
    except ValueError as exc:
        raise BadInput(str(exc)) from exc
    return found
