"""What an agent and its controller say to each other: one JSON object a line, on stdin and stdout.

The controller says what is to be done, once; then it only answers, or asks to stop. The agent tells
how far it is, asks before it changes anything that would have to be undone, and ends with "done" or
"error". If the controller goes away, the agent stops as if it had been told to.
"""

import json
import queue
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from vmckpt import errors
from vmckpt.errors import Cancelled, VmckptError
from vmckpt.units import Seconds

_INTERVAL = Seconds(0.2)
_LONGEST = 2000
"""Characters of an error of the other end."""
_GONE: dict[str, Any] = {}


class ControllerChannel:
    """The agent's end."""

    def __init__(self, heard: IO[str], said: IO[str]) -> None:
        self.stop = threading.Event()
        """Set when the controller wants no more of it, or is gone."""
        self._heard, self._said = heard, said
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lock = threading.Lock()
        self._told_at = float("-inf")

    def order(self) -> dict[str, Any]:
        """What is to be done; from then on answers are listened to. Raises ValueError, EOFError."""
        line = self._heard.readline()
        if not line:
            raise EOFError("no order")
        order: dict[str, Any] = json.loads(line)
        threading.Thread(target=self._listen, daemon=True).start()
        return order

    def _listen(self) -> None:
        for line in self._heard:
            try:
                told = json.loads(line)
            except ValueError:
                break
            if told.get("stop"):
                self.stop.set()
            else:
                self._answers.put(told)
        self.stop.set()
        self._answers.put(_GONE)

    def send(self, **what: Any) -> None:
        """Say something; a controller that hears nothing any more is noticed by what it says."""
        with self._lock:
            try:
                self._said.write(json.dumps(what, separators=(",", ":")) + "\n")
                self._said.flush()
            except OSError:
                self.stop.set()

    def progress(self, **what: Any) -> None:
        """Say how far it is, not more often than somebody can read."""
        now = time.monotonic()
        if now - self._told_at >= _INTERVAL:
            self._told_at = now
            self.send(progress=what)

    def request(self, what: str, *, limit: Seconds | None = None, **about: Any) -> Any:
        """Ask and wait for the answer. Raises VmckptError if it is no, Cancelled if the controller
        is gone, or says nothing for so long: then nothing more may be asked."""
        self.send(ask=what, about=about)
        try:
            told = self._answers.get(timeout=limit)
        except queue.Empty:
            raise Cancelled(f"the controller has said nothing for {limit:g} s") from None
        if told is _GONE:
            self._answers.put(_GONE)
            raise Cancelled("the controller is gone")
        if told.get("refused"):
            if isinstance(told.get("error"), dict):
                raise error_from_json(told["error"], "")
            raise VmckptError(str(told["refused"]))
        return told.get("answer")


_WIRE_KINDS: Mapping[str, type[VmckptError]] = {
    "WaitedInVain": errors.TimedOut, "SomeLeft": errors.GuestsRemaining,
    "WentBack": errors.GuardRolledBack, "Dismissed": errors.Superseded,
    "GuestBusy": errors.GuestLocked, "Unattended": errors.OrphanedJobs,
}  # fmt: skip
"""Errors that are called otherwise here than what the other end, of any version, reads."""
_KIND_OF = {made: kind for kind, made in _WIRE_KINDS.items()}


def error_as_json(error: VmckptError) -> dict[str, Any]:
    """An error as it is told to the other end."""
    return {
        "kind": _KIND_OF.get(type(error), type(error).__name__), "message": error.message,
        "mend": error.hint, "undone": _undone(error),
    }  # fmt: skip


def _undone(error: BaseException) -> bool:
    """Whether all was put back; what came after may hide that something was not."""
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, VmckptError) and not told.undone:
            return False
        told = told.__cause__ or told.__context__
    return True


def error_from_json(told: Mapping[str, Any], host: str) -> VmckptError:
    """The other end's error as one of ours; of a kind that is not known, the general one."""
    name = str(told.get("kind"))
    kind = _WIRE_KINDS.get(name) or getattr(errors, name, VmckptError)
    message, hint = str(told.get("message"))[:_LONGEST], told.get("mend")
    hint = None if hint is None else str(hint)[:_LONGEST]
    if not (isinstance(kind, type) and issubclass(kind, VmckptError)):
        kind = VmckptError
    if issubclass(kind, errors.HypervisorError):
        error: VmckptError = kind(message, host=host, hint=hint)
    else:
        error = kind(message, hint=hint)
    error.undone = told.get("undone") is not False
    return error
