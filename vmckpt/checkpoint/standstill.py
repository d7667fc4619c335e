"""The part of a capture for which the guest stands still: stop, device state, what changed, cont.

What QEMU is told for it is put back before the guest runs again: the capability that leaves shared
memory out of a stream would make the next `virsh save` lose the memory.
"""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from vmckpt.checkpoint import settings
from vmckpt.checkpoint.draining import Drain
from vmckpt.checkpoint.settings import PIPE, Commands, Undo
from vmckpt.errors import CaptureFailed
from vmckpt.units import Seconds

# For device state: milliseconds, unless the host hardly runs.
_PATIENCE = Seconds(10.0)
_LOOK = Seconds(0.02)
"""So often a stream that has ended is asked whether it has failed."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Marks = list[tuple[str, float]]
"""Names of steps and when each had ended."""
Mark = Callable[[str], None]


class Comparison(Protocol[T_co]):
    """What finds the changed pages, under way."""

    def result(self) -> T_co:
        """Wait for it."""


class Resumed(CaptureFailed):
    """Another program let the guest run in the middle of the pause: what was captured is not of one
    moment. It can be taken again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, mend="do not resume it meanwhile: virsh resume lets it run")
        self.found: object = None
        """What the comparison found, which holds these for changes that it has seen."""


class Standstill:
    """One epoch's pause. The pipe must have been handed over, and the facts noted."""

    def __init__(self, monitor: Commands, undo: Undo, drain: Drain) -> None:
        self._monitor = monitor
        self._undo = undo
        self._drain = drain
        self.marks: Marks = []

    def take(
        self,
        compare: Callable[[], Comparison[T]],
        barrier: Callable[[Mark], None],
        *,
        goes_on: bool = True,
    ) -> T:
        """From stop to cont. `compare` begins to look for changes once nobody writes memory any
        more; `barrier` is called once the device state is out. Unless `goes_on` it stands still
        after it. Raises HypervisorError, CaptureFailed: then it may stand still, too; and Resumed.
        """
        monitor = self._monitor
        self.mark("begin")
        monitor.tell("stop", {})
        self.mark("stop")
        # QEMU writes no memory any more: the devices were drained, and their state is only read.
        comparing = compare()
        try:
            off = {name: not on for name, on in self._undo.capabilities.items()}
            settings.set_capabilities(monitor, off)
            monitor.tell("migrate", {"uri": f"fd:{PIPE}"})
            self._wait()
            self.mark("device state")
            barrier(self.mark)
            found = comparing.result()
            self.mark("compare")
            self._must_stand()
        except Resumed as exc:
            exc.found = comparing.result()
            raise
        settings.set_capabilities(monitor, self._undo.capabilities)
        if goes_on:
            monitor.tell("cont", {})
        self.mark("cont")
        return found

    def mark(self, step: str) -> None:
        """Note that a step has ended."""
        self.marks.append((step, time.monotonic()))

    def _wait(self) -> None:
        """Until QEMU has wholly ended its migration: a `cont` before that may crash it."""
        if not self._drain.ended(_PATIENCE):
            raise self._failed("the stream does not end")
        began = looked = time.monotonic()
        while (state := self._monitor.run_state()) != "postmigrate":
            now = time.monotonic()
            if state == "running":
                raise self._resumed()
            if state not in ("paused", "finish-migrate") or now - began > _PATIENCE:
                raise self._failed(f"it is {state}")
            if now - looked < _LOOK:
                continue  # each question takes a tenth of the time that is left
            looked = now
            status = self._monitor.ask("query-migrate")
            if status["status"] == "failed":
                raise self._failed(str(status.get("error-desc", "QEMU says 'failed'")))

    def _must_stand(self) -> None:
        """It has stood still all the time: any other run state than that of a migration that has
        ended says that somebody let it run. Raises Resumed."""
        if self._monitor.run_state() != "postmigrate":
            raise self._resumed()

    def _resumed(self) -> Resumed:
        return Resumed(
            f"{self._monitor.name} on {self._monitor.host} was resumed while it was captured"
        )

    def _failed(self, why: str) -> CaptureFailed:
        return CaptureFailed(
            f"the capture of {self._monitor.name} on {self._monitor.host} broke off: {why}",
            mend="look at QEMU's log there, then try again",
        )
