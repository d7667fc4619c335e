"""Movers for the engine on the loop's clock: one that goes as a script says, and a small QEMU."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.simulated import Machine
from vmckpt.errors import HypervisorError, OutcomeUnknown, VmckptError
from vmckpt.journal.records import Request, RequestKind
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.migration import AutoConverge, JobPhase, JobSample, JobTotals, MoveOrder
from vmckpt.units import Bytes, BytesPerSecond, Seconds

RUNS = Presence(reachable=True, state=GuestState.RUNNING)
GONE = Presence(reachable=True)
OFF = Presence(reachable=True, state=GuestState.SHUT_OFF)
MOVING = Presence(reachable=True, state=GuestState.RUNNING, migrating=True)
PAUSED = Presence(reachable=True, state=GuestState.PAUSED)
SILENT = Presence(reachable=False)
IN_POST_COPY = Presence(reachable=True, state=GuestState.PAUSED, post_copy=True)
"""The source's part: paused for good."""
ON_PART = Presence(reachable=True, state=GuestState.RUNNING, post_copy=True)
"""The target's part."""
USUAL_LIMIT = Seconds(0.3)
TOTALS = JobTotals(
    total=Seconds(3.0), setup=Seconds(0.0), downtime=Seconds(0.08), iterations=3,
    transferred=Bytes(1000),
)  # fmt: skip


def refusal(text: str) -> HypervisorError:
    return HypervisorError(f"alpha: {text}", host="alpha")


@dataclass(kw_only=True)
class Told:
    """What every mover here has: it notes what it was told, and refuses what it should."""

    statistics: JobTotals | None = TOTALS
    paused_for: Seconds | None = None
    """How long the guest was paused for the switch to post-copy."""
    refuses: dict[str, list[VmckptError]] = field(default_factory=dict)
    """By call: raised the first times, in this order."""

    calls: list[str] = field(default_factory=list)
    times: list[tuple[float, str]] = field(default_factory=list)
    """The same calls with the loop's time."""
    downtime_limit: Seconds = USUAL_LIMIT

    def note(self, call: str, detail: object = None) -> None:
        self.calls.append(call if detail is None else f"{call} {detail}")
        self.times.append((asyncio.get_running_loop().time(), call))
        if self.refuses.get(call):
            raise self.refuses[call].pop(0)

    def when(self, call: str) -> list[float]:
        """The times at which that was called."""
        return [at for at, name in self.times if name == call]

    async def totals(self) -> JobTotals | None:
        return self.statistics

    async def switchover(self) -> Seconds | None:
        return self.paused_for

    async def set_autostart(self) -> None:
        self.note("autostart")

    async def set_max_downtime(self, limit: Seconds) -> None:
        self.note("downtime", f"{limit:g}")
        self.downtime_limit = limit

    async def max_downtime(self) -> Seconds:
        return self.downtime_limit

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        self.note("postcopy-bandwidth" if post_copy else "bandwidth", str(limit))

    async def throttle(self, how: AutoConverge | None) -> None:
        self.note("throttle", "usual" if how is None else how.initial)

    async def set_cache(self, size: Bytes) -> None:
        self.note("cache", size)

    async def pause_guest(self) -> None:
        self.note("halt")

    async def start_post_copy(self) -> None:
        self.note("post-copy")

    async def is_postcopy_paused(self) -> bool:
        return False

    async def free_target(self) -> None:
        self.note("free target")

    async def undefine_on_source(self) -> bool:
        self.note("forget source")
        return True

    async def undefine_on_target(self) -> bool:
        self.note("forget target")
        return True


@dataclass(kw_only=True)
class FakeMover(Told):
    """Ends after `lasts` seconds, by itself or `abort_takes` after an abort that it accepts."""

    lasts: float = 3.0
    errors: list[HypervisorError] = field(default_factory=list)
    """Raised at the ends of the first moves, in this order."""
    samples: Sequence[JobSample] = ()
    aborts_ignored: int = 0
    abort_takes: float = 0.3
    presences: list[tuple[Presence, Presence]] = field(default_factory=list)
    """Answers in this order, the last one for ever; empty: what the move led to."""

    moved: bool = False
    taken: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def migrate(self, order: MoveOrder) -> None:
        self.note("move", order.driver)
        aborted = asyncio.create_task(self.aborted.wait())
        await asyncio.wait([aborted], timeout=self.lasts)
        aborted.cancel()
        if self.aborted.is_set():
            await asyncio.sleep(self.abort_takes)
            raise refusal("migration: canceled by client")
        if self.errors:
            raise self.errors.pop(0)
        self.moved = True

    async def sample(self) -> JobSample | None:
        if not self.samples:
            return None
        self.taken += 1
        return self.samples[min(self.taken, len(self.samples)) - 1]

    async def abort(self) -> None:
        self.note("abort")
        if self.aborts_ignored:
            self.aborts_ignored -= 1
        else:
            self.aborted.set()

    async def presence(self) -> tuple[Presence, Presence]:
        if self.presences:
            return self.presences.pop(0) if len(self.presences) > 1 else self.presences[0]
        return (GONE, RUNS) if self.moved else (RUNS, GONE)


@dataclass(kw_only=True)
class FakeHosts(Told):
    """Two libvirts around a `Machine`: they move it, lose their link, and resume."""

    machine: Machine
    unplugged: Sequence[tuple[float, float]] = ()
    """From when to when, in the machine's time, the link between the hosts is dead."""
    call_lost_at: float | None = None
    """Then the connection that our call runs over breaks; the stream goes on."""
    target_dies_at: float | None = None
    source_dies_at: float | None = None
    switch_takes: bool = True
    """False: the first switch to post-copy is taken and forgotten."""

    resets: list[float] = field(default_factory=list)
    """When the connection is reset: QEMU gives the stream up at once."""
    tcp_patience: float = 900.0
    """So long TCP tries to get through; then QEMU gives the stream up."""

    dead_since: float | None = None
    resumes: int = 0
    began: float | None = None
    broken: bool = False
    aborted: bool = False
    halted_by_us: bool = False

    def __post_init__(self) -> None:
        carried = self.machine.link

        def link(at: float) -> float:
            return 0.0 if self.broken or self.dead(at) else carried(at)

        self.machine.link = link

    def dead(self, at: float) -> bool:
        cut = any(since <= at < until for since, until in self.unplugged)
        return cut or self._gone(self.target_dies_at) or self._gone(self.source_dies_at)

    def _gone(self, since: float | None) -> bool:
        return since is not None and self.machine.at >= since

    def now(self) -> float:
        """The machine's time; it goes on up to now."""
        now = asyncio.get_running_loop().time()
        if self.began is None:
            return 0.0
        at = now - self.began
        self.machine.advance(at)
        if not self.dead(at):
            self.dead_since = None
        elif self.dead_since is None:
            self.dead_since = at
        reset = bool(self.resets) and at >= self.resets[0]
        if reset:
            self.resets.pop(0)
        tired = self.dead_since is not None and at - self.dead_since >= self.tcp_patience
        if self._in_two_parts() and (reset or tired):
            self.broken, self.dead_since = True, None
        return at

    async def migrate(self, order: MoveOrder) -> None:
        self.note("resume" if order.resume else "move", order.driver)
        if not order.resume:
            self.began = asyncio.get_running_loop().time()
        elif not await self._reconnect():
            raise refusal("unable to connect to server at 'beta:49152'")
        while not self.machine.done:
            await asyncio.sleep(0.1)
            at = self.now()
            if self.aborted:
                raise refusal("migration: canceled by client")
            if self._gone(self.source_dies_at):
                raise OutcomeUnknown("alpha: the connection broke", host="alpha")
            if self.broken or (self._gone(self.target_dies_at) and self._in_two_parts()):
                self.broken = True
                raise refusal("migration: post-copy phase failed")
            if self.call_lost_at is not None and at >= self.call_lost_at:
                self.call_lost_at = None
                raise OutcomeUnknown("alpha: the connection broke", host="alpha")

    async def _reconnect(self) -> bool:
        """A dead link makes the connection hang for a while and then fail."""
        self.resumes += 1
        at = self.now()
        if self._gone(self.target_dies_at) or self._gone(self.source_dies_at):
            return False
        if self.dead(at):
            await asyncio.sleep(3.0)
            if self.dead(self.now()):
                return False
        self.broken = False
        return True

    def _in_two_parts(self) -> bool:
        return self.machine.phase is JobPhase.POST_COPY and not self.machine.done

    async def sample(self) -> JobSample | None:
        if self._gone(self.source_dies_at):
            raise refusal("no connection")
        self.now()
        if self.began is None or self.machine.done or self.aborted:
            return None
        return self.machine.sample(asyncio.get_running_loop().time())

    async def abort(self) -> None:
        self.note("abort")
        assert not self._in_two_parts(), "that kills the guest"
        self.aborted = True

    async def set_max_downtime(self, limit: Seconds) -> None:
        await super().set_max_downtime(limit)
        self.machine.max_downtime = limit

    async def throttle(self, how: AutoConverge | None) -> None:
        await super().throttle(how)
        self.machine.throttle = how

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        await super().set_bandwidth(limit, post_copy=post_copy)
        if post_copy is self._in_two_parts():
            self.machine.limit = limit

    async def pause_guest(self) -> None:
        await super().pause_guest()
        self.machine.halt()

    async def start_post_copy(self) -> None:
        await super().start_post_copy()
        if self.switch_takes:
            self.now()
            self.machine.switch()
        self.switch_takes = True

    async def is_postcopy_paused(self) -> bool:
        self.now()
        return self.broken

    async def presence(self) -> tuple[Presence, Presence]:
        at = self.now()
        source, target = self._presence()
        if self._gone(self.source_dies_at):
            source = SILENT
        if self.target_dies_at is not None and at >= self.target_dies_at:
            target = GONE
        return source, target

    def _presence(self) -> tuple[Presence, Presence]:
        if self.machine.done:
            return (OFF if "post-copy" in self.calls else GONE), RUNS
        if self._in_two_parts():
            return IN_POST_COPY, ON_PART
        return (RUNS if self.aborted else MOVING), GONE


@dataclass
class FakeDesk:
    """Requests that come at their times."""

    coming: list[tuple[float, RequestKind | str, dict[str, Any]]]
    answers: list[tuple[str, bool, str]] = field(default_factory=list)
    intents: list[str] = field(default_factory=list)

    async def intend(self, step: str, intent: Mapping[str, Any]) -> None:
        self.intents.append(step)

    async def refused(self, step: str) -> None:
        self.intents.remove(step)

    def take_requests(self) -> list[Request]:
        now = asyncio.get_running_loop().time()
        due = [one for one in self.coming if one[0] <= now]
        self.coming = [one for one in self.coming if one[0] > now]
        return [
            Request(
                id=number, operation="m1", kind=str(kind), arguments=arguments,
                asked_by="anna@desk", asked_at=at, taken_at=now, answered_at=None, ok=None,
                answer=None,
            )
            for number, (at, kind, arguments) in enumerate(due)
        ]  # fmt: skip

    def answer(self, request: Request, *, ok: bool, text: str) -> None:
        self.answers.append((request.kind, ok, text))
