"""Histories: requests of clients to a lab guest's key-value store, and the answers. Pure.

`clients` writes a history as lines of JSON while the clients run, and `parse` reads it. All times
are in seconds on this machine's monotonic clock. An operation that was called and has not returned
is pending: the guest may have executed it already, may execute it later, or may never execute it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OPERATOR = -1
"""The client ID of the program that takes and restores snapshots."""


class Kind(StrEnum):
    """The kind of an operation."""

    READ = "read"
    WRITE = "write"
    CAS = "cas"
    """Compare and set: write `value` if the cell holds `expected`."""
    ADD = "add"
    SNAPSHOT = "snapshot"
    """Save all cells under a snapshot's name."""
    RESTORE = "restore"
    """Set all cells to their values in a snapshot; to 0 if it predates the recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A client's request. Fields that a kind of operation does not use have their default value."""

    kind: Kind
    key: int = 0
    value: int = 0
    expected: int = 0
    snapshot: str = ""

    def __str__(self) -> str:
        match self.kind:
            case Kind.READ:
                return f"read key {self.key}"
            case Kind.WRITE:
                return f"write {self.value} to key {self.key}"
            case Kind.CAS:
                return f"set key {self.key} from {self.expected} to {self.value}"
            case Kind.ADD:
                return f"add {self.value} to key {self.key}"
            case Kind.SNAPSHOT | Kind.RESTORE:
                return f"{self.kind} {self.snapshot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of a client."""

    client: int
    """ID of the client. Its operations overlap if it gives up an operation and begins another."""
    input: Input
    call: float
    """Time before the request was first sent."""
    returned: float | None = None
    """Time after the answer was received; None: the operation is pending."""
    output: int | None = None
    """The cell's value right before the operation; None: not reported."""
    run: int = 0
    """The random ID of the guest's run that answered; 0 if the operation is pending."""

    def shown(self, since: float) -> str:
        """Return a description, with times in seconds after `since`."""
        answer = "" if self.output is None else f", was {self.output}"
        end = "pending" if self.returned is None else f"returned {self.returned - since:.4f}"
        by = "operator" if self.client == OPERATOR else f"client {self.client}"
        return f"{by}: {self.input}{answer} (called {self.call - since:.4f}, {end})"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All operations of a recording."""

    operations: tuple[Operation, ...]
    contradictions: tuple[str, ...] = ()
    """Requests that a run answered twice, with different answers; empty if a guest was restored."""

    @property
    def answered(self) -> int:
        """The number of clients' operations that have returned."""
        return sum(one.client != OPERATOR and one.returned is not None for one in self.operations)

    @property
    def pending(self) -> int:
        """The number of operations that have not returned."""
        return sum(one.returned is None for one in self.operations)

    def runs(self) -> Mapping[int, tuple[Operation, ...]]:
        """Return the operations by run of the guest: each run begins with all cells at 0.

        Pending operations belong to every run. So do snapshots and restores, which do not change
        the run's ID and are recorded without an ID.
        """
        numbers = dict.fromkeys(one.run for one in self.operations if one.run)
        return {
            number: tuple(one for one in self.operations if one.run in (0, number))
            for number in numbers
        }


def call_line(client: int, sequence: int, asked: Input, at: float) -> str:
    """Return the line to write before a request is sent at time `at`."""
    told = {name: getattr(asked, name) for name in ("key", "value", "expected", "snapshot")}
    given = {name: value for name, value in told.items() if value}
    return _line(event="call", client=client, sequence=sequence, at=at, kind=asked.kind, **given)


def return_line(
    client: int, sequence: int, at: float, *, output: int | None = None, run: int = 0
) -> str:
    """Return the line to write after an answer was received at time `at`."""
    return _line(event="return", client=client, sequence=sequence, at=at, output=output, run=run)


def _line(**event: Any) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


def parse(lines: Iterable[str]) -> History:
    """Read a recording. Returns the operations in the order of their calls.

    An incomplete last line is ignored, as a writer may still be writing it. Raises ValueError
    or KeyError for any other invalid line.
    """
    calls: dict[tuple[int, int], tuple[Input, float]] = {}
    returns: dict[tuple[int, int], list[tuple[float, int | None, int]]] = {}
    for line in lines:
        if not line.endswith("\n"):
            break
        told = json.loads(line)
        name = (told["client"], told["sequence"])
        if told["event"] == "call":
            calls[name] = (_input(told), told["at"])
        else:
            returns.setdefault(name, []).append((told["at"], told["output"], told["run"]))
    operations: list[Operation] = []
    contradictions: list[str] = []
    for name, (asked, called) in calls.items():
        made = _operations(name[0], asked, called, returns.get(name, []))
        operations += made
        if len({one.run for one in made}) < len(made):
            answers = " and ".join(str(one.output) for one in made)
            contradictions.append(f"client {name[0]}: {asked} was answered with {answers}")
    operations.sort(key=lambda one: one.call)
    restored = any(one.input.kind is Kind.RESTORE for one in operations)
    # A restored guest may carry out a repeated request a second time.
    kept = () if restored else tuple(contradictions)
    return History(operations=tuple(operations), contradictions=kept)


def _operations(
    client: int, asked: Input, called: float, answers: list[tuple[float, int | None, int]]
) -> list[Operation]:
    """Return an operation for each distinct answer, as each answer shows an execution."""
    if not answers:
        return [Operation(client=client, input=asked, call=called)]
    first: dict[tuple[int, int | None], float] = {}
    for at, output, run in answers:
        first.setdefault((run, output), at)
    return [
        Operation(client=client, input=asked, call=called, returned=at, output=output, run=run)
        for (run, output), at in first.items()
    ]


def _input(told: Mapping[str, Any]) -> Input:
    return Input(
        kind=Kind(told["kind"]),
        key=told.get("key", 0),
        value=told.get("value", 0),
        expected=told.get("expected", 0),
        snapshot=told.get("snapshot", ""),
    )


def lines(history: History) -> Iterable[str]:
    """Yield a history as lines for `parse`."""
    for number, one in enumerate(history.operations, 1):
        yield call_line(one.client, number, one.input, one.call)
        if one.returned is not None:
            yield return_line(one.client, number, one.returned, output=one.output, run=one.run)
