"""The sequential specification of a lab guest's key-value store. Pure.

The store itself is in assets/prover.c. Every cell holds a 64-bit number, initially 0. A cell that
is only read, written and compared is a register; a cell that is only read and added to is a
counter.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vmckpt_lab.history.history import Input, Kind, Operation

_WORD = 1 << 64
_OPERATORS = (Kind.SNAPSHOT, Kind.RESTORE)


class Cell(NamedTuple):
    """The state of a cell."""

    value: int = 0
    kept: tuple[tuple[str, int], ...] = ()
    """Pairs of a snapshot's name and the cell's value in it."""


class KeyValue:
    """A model for `linearizability.check`, in which each key is a separate object.

    Linearizability is local (Herlihy and Wing 1990, theorem 1): a history is linearizable if and
    only if its operations on each object are. Snapshots and restores apply to all keys, so for them
    this holds in only one direction: the model does not check that a restore sets all keys to their
    values at the same moment.
    """

    start = Cell()

    def parts(self, operations: Iterable[Operation]) -> Mapping[str, tuple[Operation, ...]]:
        """Return the operations by key. Drops pending operations that no answer depends on."""
        known = list(operations)
        restored = {one.input.snapshot for one in known if one.input.kind is Kind.RESTORE}
        everywhere = [
            one for one in known
            if one.input.kind in _OPERATORS and one.input.snapshot in restored
        ]  # fmt: skip
        cells: dict[int, list[Operation]] = {}
        for one in known:
            if one.input.kind not in _OPERATORS:
                cells.setdefault(one.input.key, []).append(one)
        return {
            f"key {key}": _noticeable([*cells[key], *everywhere]) for key in sorted(cells)
        }  # fmt: skip

    def step(self, state: Cell, operation: Operation) -> Cell | None:
        """Return the state after an operation; None if its output is impossible in this state."""
        asked = operation.input
        if asked.kind is Kind.SNAPSHOT:
            return Cell(state.value, (*state.kept, (asked.snapshot, state.value)))
        if asked.kind is Kind.RESTORE:
            return Cell(dict(state.kept).get(asked.snapshot, 0), state.kept)
        if operation.output is not None and operation.output != state.value:
            return None
        value = _value_after(asked, state.value)
        return state if value == state.value else Cell(value, state.kept)

    def changes(self, operation: Operation) -> bool:
        """Return whether an operation can change the cell.

        An operation with an output is possible for one value of the cell only.
        """
        asked = operation.input
        if operation.output is not None:
            return _value_after(asked, operation.output) != operation.output
        return asked.kind is not Kind.READ


def _value_after(asked: Input, before: int) -> int:
    match asked.kind:
        case Kind.WRITE:
            return asked.value
        case Kind.CAS:
            return asked.value if before == asked.expected else before
        case Kind.ADD:
            return (before + asked.value) % _WORD
        case _:
            return before


def _noticeable(operations: list[Operation]) -> tuple[Operation, ...]:
    """Return the operations without pending ones that cannot affect the result of the check.

    A read changes nothing. The value of a pending write or compare-and-set matters only if an
    answer contains this value or a compare-and-set expects it. If the operations include an
    addition, every value may matter.
    """
    added = any(one.input.kind is Kind.ADD for one in operations)
    seen = {one.output for one in operations if one.output is not None}
    seen |= {one.input.expected for one in operations if one.input.kind is Kind.CAS}

    def matters(one: Operation) -> bool:
        if one.returned is not None:
            return True
        if one.input.kind in (Kind.WRITE, Kind.CAS):
            return added or one.input.value in seen
        return one.input.kind is not Kind.READ

    return tuple(one for one in operations if matters(one))
