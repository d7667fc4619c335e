"""Drive one migration: give the order, sample, act on decisions, find out how it ended."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from vmckpt.errors import HypervisorError, PeerLoginFailed
from vmckpt.migrate import estimate, watch
from vmckpt.migrate.watch import Abort, Limits, PassCounter, Stop, Wait
from vmckpt.model.events import Decided, Event, PhaseChanged, Sampled
from vmckpt.model.jobs import Decision, JobPhase, JobSample, JobTotals, Outcome
from vmckpt.model.ports import Driver, MoveOrder, Mover
from vmckpt.units import Seconds

INTERVAL = Seconds(0.2)
# An abort that came before the job could be aborted is given again; so is one that got lost.
_ABORT_AGAIN = Seconds(0.5)
# How long both hosts are asked what became of the guest before we say that we do not know.
PATIENCE = Seconds(30.0)

log = logging.getLogger("vmckpt.migrate")

Emit = Callable[[Event], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the engine knows when it is done."""

    outcome: Outcome
    driver: Driver
    began: Seconds
    elapsed: Seconds
    totals: JobTotals | None
    samples: tuple[JobSample, ...]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    error: str | None


class Migration:
    """One run of the engine. Everything it learns is kept for the ending."""

    def __init__(self, mover: Mover, limits: Limits, emit: Emit, stop: asyncio.Event) -> None:
        self._mover = mover
        self._limits = limits
        self._emit = _harmless(emit)
        self._stop = stop
        self._began = Seconds(0.0)
        self._samples: list[JobSample] = []
        self._decisions: list[Decision] = []
        self._warnings: list[str] = []
        self._counter = PassCounter()
        self._phase = JobPhase.PREFLIGHT
        self._stopped: Stop | None = None
        self._abort_given = Seconds(0.0)

    async def run(self, order: MoveOrder) -> Ending:
        """Migrate; returns however it ends, once that is known or `PATIENCE` is used up."""
        usual = await self._mover.max_downtime()
        await self._mover.set_max_downtime(self._limits.max_downtime)
        self._began = _now()
        self._enter(JobPhase.SETUP)
        error = await self._attend(order)
        if isinstance(error, PeerLoginFailed) and self._stopped is None:
            order = dataclasses.replace(order, driver=Driver.CLIENT)
            self._decide("client-driven", error.message, {})
            error = await self._attend(order)
        outcome = await self._outcome()
        elapsed = Seconds(_now() - self._began)
        totals = None
        if outcome is Outcome.COMPLETED:
            totals = await self._totals()
            if order.autostart:
                await self._autostart()
        elif outcome not in (Outcome.UNKNOWN, Outcome.SHUT_OFF):
            await self._restore(usual)
        self._enter(JobPhase.DONE)
        if outcome is Outcome.COMPLETED and self._stopped is not None:
            self._warn("it was complete before it could be stopped")
        return Ending(
            outcome=outcome,
            driver=order.driver,
            began=self._began,
            elapsed=elapsed,
            totals=totals,
            samples=tuple(self._samples),
            decisions=tuple(self._decisions),
            warnings=tuple(self._warnings),
            error=str(error) if error is not None and outcome is not Outcome.COMPLETED else None,
        )

    async def _attend(self, order: MoveOrder) -> HypervisorError | None:
        """Give the order and watch until libvirt's call ends; return the error it ended with."""
        move = asyncio.create_task(self._mover.move(order), name="move")
        while not move.done():
            await self._turn()
            await asyncio.wait([move], timeout=INTERVAL)
        error = move.exception()
        if error is not None and not isinstance(error, HypervisorError):
            raise error
        return error

    async def _turn(self) -> None:
        """Take one sample and act on it."""
        try:
            sample = await self._mover.sample()
        except HypervisorError as exc:
            self._warn(f"no statistics: {exc.message}")
            sample = None
        if sample is not None:
            self._take(sample)
        action = watch.decide(
            self._limits, began=self._began, now=_now(), operator_stops=self._stop.is_set()
        )
        match action:
            case Wait():
                pass
            case Abort():
                await self._abort(action)

    def _take(self, raw: JobSample) -> None:
        self._counter = self._counter.after(raw.iteration)
        sample = dataclasses.replace(raw, iteration=self._counter.number(raw.iteration))
        if sample.iteration == 0 and not sample.total:
            return  # libvirt has a job, QEMU has not begun: nothing to show
        self._samples.append(sample)
        self._enter(sample.phase if self._stopped is None else JobPhase.CANCELLING)
        self._emit(
            Sampled(
                sample=sample,
                estimate=estimate.estimate(self._samples, self._limits.max_downtime),
                done=estimate.share_done(self._samples),
            )
        )

    async def _abort(self, action: Abort) -> None:
        if self._stopped is None:
            self._stopped = action.why
            last = self._samples[-1] if self._samples else None
            self._decide(
                "abort",
                action.reason,
                {
                    "elapsed_s": round(_now() - self._began, 3),
                    "iteration": last.iteration if last else 0,
                    "remaining": last.remaining if last else None,
                    "dirty_rate": last.dirty_rate if last else None,
                    "bandwidth": last.bandwidth if last else None,
                },
            )
            self._enter(JobPhase.CANCELLING)
        if _now() - self._abort_given >= _ABORT_AGAIN:
            self._abort_given = _now()
            try:
                await self._mover.abort()
            except HypervisorError as exc:
                self._warn(f"the abort was not taken: {exc.message}")

    async def _outcome(self) -> Outcome:
        """Ask both hosts until their answers settle it. An abort is still obeyed meanwhile."""
        self._enter(JobPhase.CLEANUP)
        give_up = _now() + PATIENCE
        while True:
            source, target = await self._mover.presence()
            settled = watch.settle(source, target, stopped=self._stopped)
            if settled is not None:
                return settled
            if source.migrating:
                # Our call is over but the job is not: the source's libvirtd still drives it.
                await self._turn()
                give_up = _now() + PATIENCE
            if _now() > give_up:
                self._warn(
                    f"source says {source.state or _absent(source.reachable)},"
                    f" target says {target.state or _absent(target.reachable)}"
                )
                return Outcome.UNKNOWN
            await asyncio.sleep(INTERVAL)

    async def _totals(self) -> JobTotals | None:
        totals = await self._mover.totals()
        if totals is None:
            self._warn("final statistics were gone: downtime is not known, the rest is as sampled")
            return None
        return dataclasses.replace(totals, iterations=self._counter.number(totals.iterations))

    async def _autostart(self) -> None:
        try:
            await self._mover.set_autostart()
        except HypervisorError as exc:
            self._warn(
                f"it does not start with its new host yet, run virsh autostart: {exc.message}"
            )

    async def _restore(self, usual: Seconds) -> None:
        """The guest stays here: what we set on its QEMU is set back."""
        try:
            await self._mover.set_max_downtime(usual)
        except HypervisorError as exc:
            self._warn(f"the downtime limit could not be set back to {usual:g} s: {exc.message}")

    def _enter(self, phase: JobPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._emit(PhaseChanged(phase=phase))

    def _decide(
        self, action: str, reason: str, numbers: dict[str, float | int | str | None]
    ) -> None:
        decision = Decision(at=_now(), action=action, reason=reason, numbers=numbers)
        self._decisions.append(decision)
        self._emit(Decided(decision=decision))

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)


def _harmless(emit: Emit) -> Emit:
    """A listener that fails, say because its terminal is gone, must not end a migration."""
    listening = True

    def guarded(event: Event) -> None:
        nonlocal listening
        if listening:
            try:
                emit(event)
            except Exception:
                listening = False
                log.exception("the listener failed and is told nothing more")

    return guarded


def _absent(reachable: bool) -> str:
    return "that it is not there" if reachable else "nothing"


def _now() -> Seconds:
    """The loop's clock: monotonic, and a test's to turn."""
    return Seconds(asyncio.get_running_loop().time())
