"""Named points of the agents' code, at which a process stops (SIGSTOP) until it is resumed.

The product knows nothing of them. In a lab's host the environment of all that ssh starts names this
folder's `stopping`, so that every Python there wraps the functions of `POINTS` as it imports them;
an agent hands the environment on to its guard, and that one to the next agent. A point is armed by
writing its name into a file; the first process that passes it takes the file away, leaves its
number, and stops. The wall clock of such a process jumps by the seconds in another file.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "VMCKPT_STOP_AT"
CLOCK = "VMCKPT_CLOCK"
STOPPED = ".stopped"
"""What the file's name ends in once a process stands there: it has that one's number."""


@dataclass(frozen=True, slots=True)
class Point:
    """Right before or right after a function is called."""

    module: str
    name: str
    """Of the function, or of class and method."""
    after: bool = False


POINTS: Mapping[str, Point] = {
    "begun": Point("vmckpt.replication.primary.loop", "Primary.run"),
    "first copy": Point("vmckpt.replication.primary.first_copy", "FirstCopy.run"),
    "lease armed": Point("vmckpt.lease.client", "LeaseClient.validate"),
    "standby valid": Point("vmckpt.lease.client", "LeaseClient.validate", after=True),
    "paused": Point("vmckpt.replication.dirty_pages.finder", "CompareFinder.begin"),
    "output closed": Point(
        "vmckpt.replication.primary.network_buffer", "Buffers.close_epoch", after=True
    ),
    "captured": Point("vmckpt.replication.primary.epoch_capture", "Capturer.take", after=True),
    "sending": Point("vmckpt.replication.primary.sender", "Sender.finish"),
    "sent": Point("vmckpt.replication.primary.sender", "Sender.finish", after=True),
    "acknowledged": Point("vmckpt.replication.primary.loop", "await_ack", after=True),
    "releasing": Point("vmckpt.replication.primary.network_buffer", "Buffers.release"),
    "released": Point("vmckpt.replication.primary.network_buffer", "Buffers.release", after=True),
    "idle": Point("vmckpt.replication.primary.loop", "Primary._wait"),
    "standby invalid": Point(
        "vmckpt.replication.primary.lease_holder", "LeaseHolder.invalidate", after=True
    ),
    "switching": Point("vmckpt.agent.replication.handover", "hand_over"),
    "handed over": Point(
        "vmckpt.replication.primary.lease_holder", "LeaseHolder.transfer", after=True
    ),
    "ending": Point("vmckpt.agent.replication.teardown", "unprotect"),
    "output let out": Point("vmckpt.replication.primary.network_buffer", "remove", after=True),
    "committed": Point("vmckpt.replication.backup.epoch_stage", "Stage.seal", after=True),
    "applying": Point("vmckpt.replication.backup.epoch_stage", "Stage.apply"),
    "taking over": Point("vmckpt.replication.backup.standby_setup", "adopt"),
    "taken over": Point("vmckpt.replication.backup.standby_setup", "adopt", after=True),
    "loaded": Point("vmckpt.replication.backup.standby_setup", "note_run"),
    "runs": Point("vmckpt.replication.backup.standby", "announce"),
    "standby ending": Point("vmckpt.replication.backup.standby_setup", "remove"),
    "capturing": Point("vmckpt.capture.disks.live", "DiskCapture.freeze_point", after=True),
}


def owner_of(module: ModuleType, name: str) -> tuple[object, str]:
    """Where a function is an attribute of, and under which name. Raises AttributeError."""
    owner: object = module
    *classes, last = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    if last not in vars(owner):
        raise AttributeError(f"{module.__name__} has no {name}")
    return owner, last


def wrap(module: ModuleType) -> None:
    """Let its functions that are points be ones. Raises AttributeError."""
    for name, point in POINTS.items():
        if point.module == module.__name__:
            owner, last = owner_of(module, point.name)
            setattr(owner, last, _stopping(vars(owner)[last], name, after=point.after))


def _stopping(function: Callable[..., Any], name: str, *, after: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **more: Any) -> Any:
        if not after:
            passed(name)
        told = function(*args, **more)
        if after:
            passed(name)
        return told

    return wrapped


def passed(name: str) -> None:
    """Stop here if that is wanted of the process that comes first."""
    file = Path(os.environ[VARIABLE])
    with suppress(OSError):
        if file.read_text() != name:
            return
        stopped = file.with_name(f"{file.name}{STOPPED}")
        taken = file.with_name(f"{file.name}.{os.getpid()}")
        file.rename(taken)  # one of several succeeds
        taken.write_text(str(os.getpid()))
        taken.rename(stopped)
        os.kill(os.getpid(), signal.SIGSTOP)


class Wrapping(importlib.abc.MetaPathFinder):
    """Wraps modules as they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None: it has no points, and is left to others."""
        if path is None or all(one.module != name for one in POINTS.values()):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                wrap(module)

            vars(spec.loader)["exec_module"] = executed
        return spec


_now = time.time


def jumped() -> float:
    """The wall clock's time. (libfaketime breaks Python's time.sleep.)"""
    with suppress(OSError, ValueError):
        return _now() + float(Path(os.environ[CLOCK]).read_text())
    return _now()


def install() -> None:
    """From now on in this process."""
    if VARIABLE in os.environ:
        sys.meta_path.insert(0, Wrapping())
    if CLOCK in os.environ:
        vars(time)["time"] = jumped
