"""A guest's part in a cut through several: it stands still, is captured, goes on with the others.

What it sends is held from before anybody's instant until after everybody's, so nobody can have
received what its sender, as it was captured, had not sent.
"""

from dataclasses import replace
from typing import Self

from vmckpt.agent.talk import Talk
from vmckpt.capture import network_hold
from vmckpt.capture.memory.background_snapshot import Hooks
from vmckpt.capture.migration_settings import Undo
from vmckpt.capture.network_hold import Hold
from vmckpt.errors import CaptureFailed
from vmckpt.hypervisor.qmp import Monitor
from vmckpt.model.recovery import Phase
from vmckpt.units import Seconds

# More than the controller waits for the others, and less in all than output is held.
PATIENCE = {Phase.READY: Seconds(90.0), Phase.STOPPED: Seconds(6.0), Phase.CAPTURED: Seconds(6.0)}


class Cut:
    """One guest of it. Use as `with Cut(monitor, talk) as cut`; leaving it lets the output go."""

    def __init__(self, monitor: Monitor, talk: Talk) -> None:
        """Notes the facts. Raises CannotCapture if its output cannot be held, and VmckptError."""
        self._talk = talk
        undo = network_hold.look(monitor)
        talk.ask("intend", step="hold", facts=undo.to_json())
        self._hold = Hold(monitor, undo)
        self._ready = self._stood = False
        self.held = Seconds(0.0)
        """How long output was held."""

    def __enter__(self) -> Self:
        self._hold.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises CaptureFailed if some of its output may still be held."""
        self._hold.__exit__(kind, error, trace)

    def hooks(self, own: Hooks) -> Hooks:
        """A capture's hooks, with the others waited for."""

        def note(undo: Undo) -> None:
            own.note(undo)
            if self._stood:
                raise CaptureFailed("its first way of capture failed after the others had stopped")
            if not self._ready:
                self._reached(Phase.READY)
                self._ready = True

        def barrier() -> None:
            self._stood = True
            # It stands still: what it sent so far is out, and nobody has been captured yet.
            self._hold.begin()
            self._reached(Phase.STOPPED)
            if own.barrier is not None:
                own.barrier()

        def captured() -> None:
            own.captured()
            self._reached(Phase.CAPTURED)
            self.held = self._hold.let_go()

        return replace(own, note=note, barrier=barrier, captured=captured, given_up=self._hold.drop)

    def _reached(self, phase: Phase) -> None:
        """Wait until all have. Raises VmckptError if somebody has not."""
        self._talk.ask("cut", phase=phase, limit=PATIENCE[phase])
