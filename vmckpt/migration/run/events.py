"""Events that a migration emits while it is running, and keeps for its report."""

import asyncio
import logging
from collections.abc import Callable

from vmckpt.migration.run import actions
from vmckpt.migration.run import decide as run_decide
from vmckpt.model.events import Decided, Event, PhaseChanged
from vmckpt.model.migration import Decision, JobPhase
from vmckpt.units import Seconds

log = logging.getLogger("vmckpt.migrate")


class EventEmitter:
    """Emits phases and decisions, and collects decisions and distinct warnings."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._listener = emit
        self._listening = True
        self._phase = JobPhase.PREFLIGHT
        self.decisions: list[Decision] = []
        self.warnings: list[str] = []

    def emit(self, event: Event) -> None:
        """Pass an event to the listener.

        A failing listener, for example one whose terminal is gone, must not stop a migration.
        """
        if self._listening:
            try:
                self._listener(event)
            except Exception:
                self._listening = False
                log.exception("a listener of the migration failed and receives no further events")

    def enter(self, phase: JobPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self.emit(PhaseChanged(phase=phase))

    def verdict(self, verdict: run_decide.Verdict, *, acted: bool) -> None:
        action = actions.says(verdict.action)
        self.decide(action, verdict.reason, verdict.rule, verdict.numbers, acted)

    def decide(
        self,
        action: str,
        reason: str,
        rule: str,
        numbers: run_decide.Numbers | None = None,
        acted: bool = True,
    ) -> None:
        now = Seconds(asyncio.get_running_loop().time())
        decision = Decision(
            at=now, action=action, reason=reason, rule=rule, acted=acted, numbers=numbers or {}
        )
        self.decisions.append(decision)
        self.emit(Decided(decision=decision))

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
