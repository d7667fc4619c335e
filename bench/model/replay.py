"""Run the product's code one effect at a time.

A function of the product runs on fakes. For everything that the function reads from the world or
does to the world, a fake calls `do`. `run` provides the answers so far, and returns the first
effect without an answer. A process of the model is therefore plain data: the function's name and
its answers. It can be copied, compared, and killed between any two effects.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from vmckpt.errors import HypervisorError, LeaseLost, VmckptError
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.protocol.connection import ConnectionLost

NOW = 1000.0
"""Time of all clocks while code is replayed. Times in the model are ages, in ticks before NOW."""
NEVER = -99
"""The age of a time that counts as expired forever (-inf)."""
NONE = -98
"""The age of a time that is not set (0.0)."""


class Effect(NamedTuple):
    """The next access of the code to the world."""

    name: str
    args: tuple[Any, ...]


class Done(NamedTuple):
    """The code has returned `result`, or raised an error of the class named `error`."""

    result: Any
    error: str | None


class Task(NamedTuple):
    """A process between two effects."""

    entry: str
    args: tuple[Any, ...]
    answers: tuple[tuple[str, Any], ...]

    def told(self, kind: str, value: Any) -> "Task":
        """Return the task after another answer."""
        return Task(self.entry, self.args, (*self.answers, (kind, value)))


class Again(BaseException):
    """The code waits in a loop. It is run again from the beginning, with the state that it kept."""


class _Pending(BaseException):
    """There is no answer yet. Not an Exception, so that no handler in the product catches it."""


_ERRORS: dict[str, Callable[[], Exception]] = {
    "cut": lambda: ConnectionLost("the link broke"),
    "unreachable": lambda: LeaseUnreachable("no answer"),
    "gone": lambda: HypervisorError("QEMU is gone", host="alpha"),
    "lost": lambda: LeaseLost("the lease is lost"),
}


class _Script:
    """The answers of the current run."""

    def __init__(self, answers: tuple[tuple[str, Any], ...]) -> None:
        self.answers, self.at = answers, 0
        self.pending: Effect | None = None

    def next(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.pending is not None:
            raise _Pending  # cleanup code after the first pending effect
        if self.at == len(self.answers):
            self.pending = Effect(name, args)
            raise _Pending
        kind, value = self.answers[self.at]
        self.at += 1
        if kind == "raise":
            error = _ERRORS[value]()
            raise error
        if kind == "age":
            return time_of(value)
        return dict(value) if kind == "told" else value


_script = _Script(())


def do(name: str, *args: Any) -> Any:
    """Return the world's answer to an effect. Called by fakes."""
    return _script.next(name, args)


def time_of(age: int) -> float:
    """Return the clock reading of `age` ticks ago."""
    return float("-inf") if age == NEVER else 0.0 if age == NONE else NOW - age


def age_of(reading: float) -> int:
    """Return the age of a clock reading, in ticks; the reverse of `time_of`."""
    if reading == float("-inf"):
        return NEVER
    return NONE if reading == 0.0 else round(NOW - reading)


class Replayer:
    """Runs entries by name, and caches their results by answers."""

    def __init__(self, entries: dict[str, Callable[..., Any]]) -> None:
        self._entries = entries
        self._known: dict[Task, Effect | Done] = {}

    def run(self, task: Task) -> Effect | Done:
        """Return the next effect of a task, or its result."""
        found = self._known.get(task)
        if found is None:
            found = self._known[task] = self._run(task)
        return found

    def _run(self, task: Task) -> Effect | Done:
        global _script  # noqa: PLW0603 - fakes deep in the product's code reach it
        script = _script = _Script(task.answers)
        try:
            result, error = self._entries[task.entry](*task.args), None
        except _Pending:
            result, error = None, None
        except Again:
            result, error = None, "Again"
        except VmckptError as exc:  # the process dies
            result, error = None, type(exc).__name__
        if script.pending is not None:
            return script.pending
        if script.at < len(script.answers):
            raise RuntimeError(f"{task.entry} takes other steps than before: not deterministic")
        return Done(result, error)
