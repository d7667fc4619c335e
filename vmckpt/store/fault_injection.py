"""Points at which a crash test can kill the process, to simulate a power failure.

`VMCKPT_FAULT` names one of `POINTS`. The optional number in `pack: put#3` is how many times the
process passes the point before it is killed.
"""

import os
import signal
import threading
from collections.abc import Callable

POINTS = (
    "local: temporary made",
    "local: written",
    "local: synced",
    "local: published",
    "local: deleted",
    "lock: taken",
    "lock: knows",
    "lock: released",
    "pack: put",
    "writer: finished",
    "publish: checked",
    "publish: wraps",
    "publish: manifest",
    "delete: locked",
    "delete: checked",
    "delete: manifest",
    "delete: wraps",
    "pin: put",
    "gc: locked",
    "gc: decided",
    "gc: object deleted",
    "gc: to be looked for again",
    "gc: condemnation closed",
    "gc: rewritten",
    "gc: condemned",
    "gc: lock removed",
    "gc: leftover removed",
)

_passed: dict[str, int] = {}
_guard = threading.Lock()
_listener: Callable[[str], None] | None = None


def listen(listener: Callable[[str], None] | None) -> None:
    """Set the function that is called with each point that is passed; None: no function."""
    global _listener  # noqa: PLW0603  one process, one campaign
    _listener = listener


def fault(point: str) -> None:
    """Call the listener, if any, and kill the process if `VMCKPT_FAULT` names this point."""
    if _listener is not None:
        _listener(point)
    asked = os.environ.get("VMCKPT_FAULT")
    if asked is None:
        return
    name, _, times = asked.partition("#")
    if name != point:
        return
    with _guard:
        _passed[point] = _passed.get(point, 0) + 1
        if _passed[point] > int(times or 0):
            os.kill(os.getpid(), signal.SIGKILL)
