"""Named points in the agents' code at which a process stops (SIGSTOP) until it is resumed.

The product knows nothing about these points. On a lab host, the directory `stopping` is in the
PYTHONPATH of all processes that ssh starts, so every Python process wraps the functions in `POINTS`
when it imports them. An agent passes its environment on to its watchdog, and the watchdog to the
next agent. To arm a point, write its name to a file. The first process that passes the point
renames the file, writes its process ID to it, and stops. Another file contains the offset of these
processes' wall clock, in seconds.
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
"""Suffix of the file's name once a process has stopped; the file then contains its process ID."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point right before or right after a call of a function."""

    module: str
    name: str
    """Name of the function, or of the class and method."""
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
    """Return the object that has a function as an attribute, and the attribute's name.

    Raises AttributeError if the module has no such function.
    """
    owner: object = module
    *classes, last = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    if last not in vars(owner):
        raise AttributeError(f"{module.__name__} has no {name}")
    return owner, last


def wrap(module: ModuleType) -> None:
    """Wrap the functions of a module that are points. Raises AttributeError."""
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
    """Stop this process if the point is armed and no other process has stopped there."""
    file = Path(os.environ[VARIABLE])
    with suppress(OSError):
        if file.read_text() != name:
            return
        stopped = file.with_name(f"{file.name}{STOPPED}")
        taken = file.with_name(f"{file.name}.{os.getpid()}")
        file.rename(taken)  # succeeds in only one of several processes
        taken.write_text(str(os.getpid()))
        taken.rename(stopped)
        os.kill(os.getpid(), signal.SIGSTOP)


class Wrapping(importlib.abc.MetaPathFinder):
    """Wraps modules as they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that wraps the module after its import; None if it has no points."""
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
    """Return the time of the adjusted wall clock. (libfaketime breaks Python's time.sleep.)"""
    with suppress(OSError, ValueError):
        return _now() + float(Path(os.environ[CLOCK]).read_text())
    return _now()


def install() -> None:
    """Wrap modules and adjust the clock in this process, as the environment requests."""
    if VARIABLE in os.environ:
        sys.meta_path.insert(0, Wrapping())
    if CLOCK in os.environ:
        vars(time)["time"] = jumped
