"""Places where a campaign of crashes may end the process, as if the power had gone.

`VMCKPT_FAULT` names one of `POINTS`, or one and how often it is passed before (`pack: put#3`).
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
    """Tell somebody in this process of every point that is passed; None: nobody any more."""
    global _listener  # noqa: PLW0603  one process, one campaign
    _listener = listener


def fault(point: str) -> None:
    """End the process here, if a campaign asks for it."""
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
