"""Real code, run one effect at a time.

A function of the product runs on fakes that call `do` for everything that it reads from the world
or does to it. `run` gives it the answers it had so far and returns the first effect without one.
A process of the model is therefore plain data: the function's name and its answers. It can be
copied, compared, and killed between any two effects.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from vmckpt.errors import HypervisorError, LeaseLost, VmckptError
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.protocol.connection import ConnectionLost

NOW = 1000.0
"""What clocks show while code is replayed: times in the model are ages, in ticks before now."""
NEVER = -99
"""The age of what counts as expired for good (-inf)."""
NONE = -98
"""The age of what is not set (0.0)."""


class Effect(NamedTuple):
    """What the code wants next."""

    name: str
    args: tuple[Any, ...]


class Done(NamedTuple):
    """The code has returned `result`, or raised an error of that class name."""

    result: Any
    error: str | None


class Task(NamedTuple):
    """A process between two effects."""

    entry: str
    args: tuple[Any, ...]
    answers: tuple[tuple[str, Any], ...]

    def told(self, kind: str, value: Any) -> "Task":
        """The same after one more answer."""
        return Task(self.entry, self.args, (*self.answers, (kind, value)))


class Again(BaseException):
    """The code waits for something in a loop: it begins anew, with what is kept of it."""


class _Pending(BaseException):
    """There is no answer yet. Not an Exception: no handler of the product's may take it."""


_ERRORS: dict[str, Callable[[], Exception]] = {
    "cut": lambda: ConnectionLost("the link broke"),
    "unreachable": lambda: LeaseUnreachable("no answer"),
    "gone": lambda: HypervisorError("QEMU is gone", host="alpha"),
    "lost": lambda: LeaseLost("the lease is lost"),
}


class _Script:
    """The answers of the run that is under way."""

    def __init__(self, answers: tuple[tuple[str, Any], ...]) -> None:
        self.answers, self.at = answers, 0
        self.pending: Effect | None = None

    def next(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.pending is not None:
            raise _Pending  # code that cleans up after the first one
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
    """Called by fakes: the world's answer to an effect."""
    return _script.next(name, args)


def time_of(age: int) -> float:
    """A clock's reading that was taken so many ticks ago."""
    return float("-inf") if age == NEVER else 0.0 if age == NONE else NOW - age


def age_of(reading: float) -> int:
    """The reverse."""
    if reading == float("-inf"):
        return NEVER
    return NONE if reading == 0.0 else round(NOW - reading)


class Replayer:
    """Entries by name, and what each did with answers that it had before."""

    def __init__(self, entries: dict[str, Callable[..., Any]]) -> None:
        self._entries = entries
        self._known: dict[Task, Effect | Done] = {}

    def run(self, task: Task) -> Effect | Done:
        """What a task does next."""
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
        except VmckptError as exc:  # the process dies of it
            result, error = None, type(exc).__name__
        if script.pending is not None:
            return script.pending
        if script.at < len(script.answers):
            raise RuntimeError(f"{task.entry} takes other steps than before: not deterministic")
        return Done(result, error)
