"""Carry out a plan: run each move as an ordinary migration, and adapt the plan to its result."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from vmckpt.errors import Blocked, Cancelled
from vmckpt.evacuation import state as states
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.interfaces import Arrived, Moved, MoveEnd, Prefetcher, Turn, World
from vmckpt.evacuation.plan import inventory as sights
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.fleet import Fleet, Tenant
from vmckpt.evacuation.plan.inventory import ON_ITS_WAY, FleetView, Known, TravelMethod
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.plan.plan import Plan
from vmckpt.evacuation.state import EvacuationTerms, Failed, RunState
from vmckpt.evacuation.task import FLEET, Task
from vmckpt.journal.records import Request, RequestKind
from vmckpt.migration.run.operator_requests import StepLog
from vmckpt.model.events import Decided
from vmckpt.model.migration import Decision
from vmckpt.units import Seconds, show_seconds

MOVING, PAUSED, STOPPING = "", "paused", "stopping"
"""The phases of a run."""
POLL = Seconds(0.5)
"""Interval between checks for requests from other terminals."""
_SILENT = Seconds(5.0)
"""Interval between queries of the hosts while no guest can move."""
_OLD = Seconds(60.0)
"""A fleet view older than this is renewed before the next move: other jobs move guests, too."""
_SELDOM = 10.0
"""The maximum age of a fleet view is at least this multiple of the last query's duration."""
_LOST = Seconds(300.0)
"""The run gives up on a host that does not answer for this long while no guest is moving."""
_LOOKS = 12
"""Number of consecutive queries without a change after which waiting guests are given up; also the
maximum number of queries until the run's host first answers."""


class Run:
    """One run of an evacuation, from its plan to its result.

    `stop`: once set, no new moves start, but running moves finish. `tell`: called with each
    decision. `step_log`: provides the requests of other terminals, if any. `mark`: records the
    phase of the run, for a controller that may have to continue the run.
    """

    def __init__(
        self, world: World, task: Task, terms: EvacuationTerms, stop: asyncio.Event, *,
        tell: Callable[[Decided], None], step_log: StepLog | None = None,
        mark: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._world, self._task, self._terms = world, task, terms
        self._stop, self._tell_ = stop, tell
        self._step_log, self._mark, self._marked = step_log, mark, MOVING
        self._cancelled = False
        """Whether the operator cancelled the run; `stop` may also be set by a shutdown signal."""
        self._state = RunState()
        self._seen: FleetView | None = None
        self._seen_at = self._look_took = Seconds(0.0)
        self._silent_since: Seconds | None = None
        """When the host first failed to answer; None if it answered the last query."""
        self._known: dict[str, Known] = {}
        """Guests as they were when their moves began, by name. A guest may have changed since."""
        self._plan: Plan | None = None
        self._moves: dict[asyncio.Task[Moved], Move] = {}
        self._ahead = Prefetcher(self._start)
        self._next: Sequence[Move] = ()
        """Moves that are worth preparing, in order."""
        self._arrived: list[Arrived] = []
        self._shut: list[str] = []
        self._foreign: set[str] = set()
        self._stuck = 0
        """Number of consecutive queries without a change."""
        self._asked: RunState | None = None
        self._asked_until = Seconds(0.0)
        self._began = _now()

    async def through(self, plan: Plan | None) -> MoveEnd:
        """Carry out the run.

        `plan`: a plan that was just made; None: the current state determines the moves. Raises
        Blocked or Cancelled if the host does not answer at first, and the errors of World.look.
        """
        self._plan = plan
        try:
            await self._look_first()
            while True:
                self._hear()
                ended, anew = self._take()
                if anew:
                    await self._replan()
                    continue
                if ended and _now() - self._seen_at > max(_OLD, _SELDOM * self._look_took):
                    await self._look_again()
                    continue
                self._begin()
                self._make_ready()
                if self._over:
                    break
                await self._wait()
            await self._ahead.dismiss()
            await self._stop_others()
        finally:
            # Migrations that are interrupted here stay in the journal, for recovery.
            for one in self._moves:
                one.cancel()
            self._ahead.cancel()
        return self._ended()

    @property
    def _over(self) -> bool:
        if self._moves:
            return False
        return self._stop.is_set() or (self._state.over and not self._foreign)

    def _hear(self) -> None:
        self._take_requests()
        stands = STOPPING if self._cancelled else PAUSED if self._state.paused else MOVING
        if stands != self._marked:
            self._marked = stands
            self._mark(stands)

    def _take_requests(self) -> None:
        for request in self._step_log.take_requests() if self._step_log is not None else ():
            match request.kind:
                case RequestKind.CANCEL:
                    self._cancelled = True
                    self._stop.set()
                    self._answer(request, "no new moves start; running moves finish")
                case RequestKind.PAUSE:
                    self._state = replace(self._state, paused=True)
                    self._answer(request, "paused: no new moves start until the run is resumed")
                case RequestKind.GO_ON:
                    self._state = replace(self._state, paused=False)
                    self._answer(request, "resumed")
                case _:
                    self._answer(
                        request, "send this request to the migration job of one guest", ok=False
                    )

    def _answer(self, request: Request, text: str, *, ok: bool = True) -> None:
        if self._step_log is not None:
            self._step_log.answer(request, ok=ok, text=text)
        self._tell(str(self._task.kind), text, "operator")

    async def _look_first(self) -> None:
        """Query the hosts until the run's host answers: otherwise, its guests are unknown.

        Raises Blocked after _LOOKS queries, and Cancelled.
        """
        for _ in range(_LOOKS):
            await self._replan()
            if self._seen is not None:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _SILENT)
                raise Cancelled(f"stopped: {self._task.host} does not answer; no move was started")
        raise Blocked(
            f"{self._task.host} no longer answers; no move was started",
            hint=f"run vmckpt doctor {self._task.host}",
        )

    async def _replan(self) -> None:
        """Assign new targets to all waiting guests, based on the current state.

        If the run's host does not answer, the targets stay as they are.
        """
        seen = await self._look()
        if self._task.host in seen.silent:
            if self._silent_since is None:
                self._silent_since = _now()
            return  # the host's guests are unknown, so the plan stays as it is
        self._silent_since = None
        self._plan_by(seen)

    async def _look_again(self) -> None:
        """Renew the view and replan, unless a host that answered before does not answer now."""
        seen, before = await self._look(), self._seen
        if before is not None and not seen.silent.keys() - before.silent.keys():
            self._plan_by(seen)

    async def _look(self) -> FleetView:
        began = _now()
        seen = await self._world.look()
        self._seen_at, self._look_took = _now(), Seconds(_now() - began)
        return seen

    def _plan_by(self, seen: FleetView) -> None:
        self._seen = seen
        asked, ours = self._task.asked(seen), {one.name for one in self._moves.values()}
        given_up = {one.tenant.name for one in self._state.left}
        # The run waits for guests that another job is moving.
        foreign = {
            one.name for one in seen.fleet.tenants
            if one.name in asked and one.stays == ON_ITS_WAY and one.name not in ours | given_up
        }  # fmt: skip
        for name in sorted(foreign - self._foreign):
            self._tell(name, "is being moved by another job; waiting until it has arrived", "wait")
        self._foreign = foreign
        self._state = states.planned(
            self._state, self._fleet(seen), self._terms.rules, _now(), asked=asked - self._foreign
        )

    def _fleet(self, seen: FleetView) -> Fleet:
        fleet = self._task.fleet(seen)
        if self._plan is None:
            return fleet
        checks = self._plan.checks
        known = plans.without(fleet, checks)
        return plans.expected(known, self._plan.going, checks, None)

    def _begin(self) -> None:
        if self._stop.is_set() or self._seen is None:
            return
        self._state = states.carrying(self._state, self._world.streams())
        self._state = states.nearing(self._state, self._world.nearing())
        if self._state is self._asked and _now() < self._asked_until:
            return  # nothing has changed since the last attempt, when no move could begin
        fleet = self._fleet(self._seen)
        for move in states.due(self._state, fleet, self._terms, _now()):
            self._state = states.begins(self._state, [move])
            self._moves[self._ahead.begin(move)] = move
            self._tell(f"{move.name} → {move.target}", "begins", "evacuate")
        self._next = states.next_ones(self._state, fleet, self._terms, _now())
        wakes = states.wakes(self._state, _now(), self._terms.patience)
        self._asked = self._state
        self._asked_until = Seconds(math.inf) if wakes is None else Seconds(wakes)

    def _start(self, move: Move, turn: Turn) -> asyncio.Task[Moved]:
        assert self._seen is not None
        known = self._known[move.name] = self._seen.known[move.name]
        return asyncio.create_task(self._world.move(known, move.target, turn), name=move.name)

    def _make_ready(self) -> None:
        """Prepare the next moves; while the run is paused, prepared moves stay prepared."""
        if self._stop.is_set():
            self._ahead.look(())
        elif not self._state.paused:
            self._ahead.look(self._next)

    def _take(self) -> tuple[bool, bool]:
        """Process the moves that have ended. Returns whether any move has ended, and whether the
        waiting guests need a new plan."""
        ended = [one for one in self._moves if one.done()]
        good = [self._end(self._moves.pop(one), one.result()) for one in ended]
        for move, work in self._ahead.ended():
            # A move that fails before it is permitted to begin counts as begun.
            self._state = states.begins(self._state, [move])
            good.append(self._end(move, work.result()))
        last = not self._state.waiting or self._state.hoping
        return bool(good), bool(good) and bool(last or not all(good))

    async def _wait(self) -> None:
        """Wait for a change, at most until the next check for requests."""
        if not self._moves:
            await self._idle()
            return
        works = self._ahead.works | set(self._moves)
        await asyncio.wait(works, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)

    async def _idle(self) -> None:
        """Wait, while no guest is moving, until a guest may be retried or the hosts should be
        queried again."""
        now = _now()
        wakes = states.wakes(self._state, now, self._terms.patience)
        until = now + _SILENT if wakes is None else wakes
        while not self._stop.is_set() and (_now() < until or self._state.paused):
            await asyncio.sleep(POLL)
            self._hear()
            if any(one.done() for one in self._ahead.works):
                return
        if self._stop.is_set():
            return
        await self._replan()
        if self._silent_since is not None and _now() - self._silent_since >= _LOST:
            self._lost()
        elif wakes is not None or self._foreign:
            self._stuck = 0
        elif (stuck := self._stuck + 1) < _LOOKS:
            self._stuck = stuck
        else:
            for one in self._state.waiting:
                self._state = states.stuck(self._state, one)

    def _lost(self) -> None:
        """Give up the guests that are still on a host that no longer answers."""
        course, host = self._state, self._task.host
        late = [one.tenant for one in course.waiting] + [one.tenant for one in course.hoping]
        late += [_tenant(self._seen, name) for name in sorted(self._foreign)]
        why, hint = f"{host} no longer answers", f"run vmckpt doctor {host}"
        left = (Unplaced(tenant=one, why=why, hint=hint) for one in late)
        self._state = replace(course, waiting=(), hoping=(), left=(*course.left, *left))
        self._foreign = set()

    def _end(self, move: Move, moved: Moved) -> bool:
        """Process the result of a move. Returns whether it succeeded."""
        assert self._seen is not None
        known = self._known[move.name]
        if moved.good:
            self._state = states.succeeded(self._state, move.name)
            self._seen = sights.moved(self._seen, move.name, move.target)
            self._stuck = 0
            self._arrived.append(
                Arrived(
                    guest=move.name, uuid=known.guest.uuid, source=move.source, target=move.target,
                    job=moved.job, took=moved.took, downtime=moved.downtime,
                    standby=known.way is TravelMethod.ANEW,
                )
            )  # fmt: skip
            self._tell(f"{move.name} → {move.target}", self._arrived_text(moved), "evacuate")
            return True
        self._tell(f"{move.name} → {move.target}", f"failed: {moved.why}", "evacuate")
        if moved.final:
            self._state = states.given_up(self._state, move.name, moved.why, moved.final)
            return False
        failure = Failed(target=move.target, at=_now(), why=moved.why, blame=moved.blame)
        self._state = states.failed(self._state, move.name, failure, self._terms.patience)
        return False

    def _arrived_text(self, moved: Moved) -> str:
        course = self._state
        done = len(course.done)
        of = done + len(course.waiting) + len(course.running) + len(course.left)
        pause = "" if moved.downtime is None else f", downtime {show_seconds(moved.downtime)}"
        return f"moved in {show_seconds(moved.took)}{pause}; {done} of {of}"

    async def _stop_others(self) -> None:
        """Shut down and suspend the guests whose policy requires this, unless the run is stopped.

        These guests come last, to keep their downtime short.
        """
        if self._seen is None or self._stop.is_set():
            return
        names = sorted(self._task.to_stop(self._seen))
        paused = self._state.paused
        while names and self._state.paused:
            await asyncio.sleep(POLL)
            self._hear()
            if self._stop.is_set():
                return
        if names and paused:  # the pause may have lasted hours
            await self._replan()
            names = sorted(self._task.to_stop(self._seen))

        async def one(name: str) -> None:
            known = self._seen.known[name] if self._seen is not None else None
            assert known is not None
            verb, done = ("suspended", "saved") if known.suspends else ("shut down", "shut off")
            self._tell(name, f"is being {verb}, as its policy requires", "evacuate")
            why = await self._world.stop(known)
            if why is None:
                self._shut.append(known.guest.uuid)
                self._tell(name, f"is {done}", "evacuate")
                return
            hint = _again(self._task)
            if not known.suspends:  # the guest ignores the power button: another press is useless
                hint = (
                    f"shut {name} down from inside, or set a longer evacuate.shutdown in its"
                    f" policy, then {hint}"
                )
            left = Unplaced(tenant=_tenant(self._seen, name), why=why, hint=hint)
            self._state = replace(self._state, left=(*self._state.left, left))

        await asyncio.gather(*(one(name) for name in names))

    def _tell(self, action: str, reason: str, rule: str) -> None:
        self._tell_(Decided(decision=Decision(at=_now(), action=action, reason=reason, rule=rule)))

    def _ended(self) -> MoveEnd:
        course = self._state
        left: tuple[Unplaced, ...] = (*course.left, *course.hoping, *self._stopped_before())
        if self._seen is not None:  # omit guests that were to move only to make room for others
            wanted = self._task.asked(self._seen) | self._task.to_stop(self._seen)
            left = plans.worded((one for one in left if one.tenant.name in wanted), self._seen)
            left += self._task.unseen(self._seen)
        return MoveEnd(
            arrived=tuple(self._arrived), shut_down=tuple(self._shut), left=left,
            stopped=self._stop.is_set(),
            took=Seconds(_now() - self._began),
        )  # fmt: skip

    def _stopped_before(self) -> list[Unplaced]:
        """Return the guests that the run has not yet moved, shut down or suspended."""
        hint = _again(self._task)
        late = [
            (one.tenant, "the run stopped before the guest was moved")
            for one in self._state.waiting
        ]
        if self._stop.is_set() and self._seen is not None:
            late += [(_tenant(self._seen, name), ON_ITS_WAY) for name in sorted(self._foreign)]
            told = {one.tenant.name for one in self._state.left}
            late += [
                (
                    _tenant(self._seen, name),
                    "the run stopped before the guest was shut down or suspended",
                )
                for name in sorted(self._task.to_stop(self._seen) - told)
                if self._seen.known[name].guest.uuid not in self._shut
            ]  # fmt: skip
        return [Unplaced(tenant=tenant, why=why, hint=hint) for tenant, why in late]


def _again(task: Task) -> str:
    if task.host == FLEET:
        return f"run vmckpt {task.kind} again"
    return f"run vmckpt {task.kind} {task.host} again"


def _tenant(seen: FleetView | None, name: str) -> Tenant:
    assert seen is not None
    return next(one for one in seen.fleet.tenants if one.name == name)


def _now() -> Seconds:
    return Seconds(asyncio.get_running_loop().time())
