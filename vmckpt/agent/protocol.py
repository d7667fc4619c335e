"""The protocol between an agent and its controller: one JSON object per line, on stdin and stdout.

The controller sends one order; after that it only answers requests, or asks the agent to stop. The
agent reports progress, sends a request before each change that might have to be undone, and
finishes with "done" or "error". If the controller disappears, the agent stops as if it had been
asked to stop.
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
"""Maximum length of the message and of the hint of a received error, in characters."""
_GONE: dict[str, Any] = {}


class ControllerChannel:
    """The agent's end of the connection to its controller."""

    def __init__(self, heard: IO[str], said: IO[str]) -> None:
        self.stop = threading.Event()
        """Set when the controller asks the agent to stop, or has disappeared."""
        self._heard, self._said = heard, said
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lock = threading.Lock()
        self._told_at = float("-inf")

    def order(self) -> dict[str, Any]:
        """Read the order, and start listening for answers. Raises ValueError, EOFError."""
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
        """Send a message. If the controller no longer reads, `stop` is set."""
        with self._lock:
            try:
                self._said.write(json.dumps(what, separators=(",", ":")) + "\n")
                self._said.flush()
            except OSError:
                self.stop.set()

    def progress(self, **what: Any) -> None:
        """Send progress. Drops the message if the last progress was sent less than 0.2 s ago."""
        now = time.monotonic()
        if now - self._told_at >= _INTERVAL:
            self._told_at = now
            self.send(progress=what)

    def request(self, what: str, *, limit: Seconds | None = None, **about: Any) -> Any:
        """Send the request `what` with the arguments `about`, and return the answer.

        `limit`: maximum time to wait; None: no limit. Raises VmckptError if the controller refuses,
        and Cancelled if the controller is gone or does not answer in time. After Cancelled, no
        other request may be sent.
        """
        self.send(ask=what, about=about)
        try:
            told = self._answers.get(timeout=limit)
        except queue.Empty:
            raise Cancelled(f"the controller did not answer within {limit:g} s") from None
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
"""Errors whose names in messages differ from their names in the code.

The names in messages never change.
"""
_KIND_OF = {made: kind for kind, made in _WIRE_KINDS.items()}


def error_as_json(error: VmckptError) -> dict[str, Any]:
    """Return the message that reports an error to the other end."""
    return {
        "kind": _KIND_OF.get(type(error), type(error).__name__), "message": error.message,
        "mend": error.hint, "undone": _undone(error),
    }  # fmt: skip


def _undone(error: BaseException) -> bool:
    """Return whether all changes were undone, according to the error and all its causes."""
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, VmckptError) and not told.undone:
            return False
        told = told.__cause__ or told.__context__
    return True


def error_from_json(told: Mapping[str, Any], host: str) -> VmckptError:
    """Return the error that the other end of the connection, on `host`, reported.

    `told` contains no host, so an error is always attributed to the host that reported it.
    An error of an unknown kind becomes a VmckptError.
    """
    name = str(told.get("kind"))
    kind = _WIRE_KINDS.get(name) or getattr(errors, name, VmckptError)
    message, hint = str(told.get("message"))[:_LONGEST], told.get("mend")
    hint = None if hint is None else str(hint)[:_LONGEST]
    if not (isinstance(kind, type) and issubclass(kind, VmckptError)):
        kind = VmckptError
    error: VmckptError = kind(message, host=host, hint=hint)
    error.undone = told.get("undone") is not False
    return error
