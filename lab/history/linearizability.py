"""Check histories for linearizability: could a single sequential copy have answered this way? Pure.

A history is linearizable if its operations have an order that a sequential model allows, and in
which every operation comes after all operations that returned before it was called (Herlihy and
Wing, "Linearizability: A Correctness Condition for Concurrent Objects", TOPLAS 12(3), 1990).

The search uses the algorithm of Wing and Gong ("Testing and Verifying Concurrent Objects", JPDC 17,
1993): the next operation may be any that was called before the first remaining operation returned.
It never visits a configuration twice; a configuration is a set of ordered operations with a state
(Lowe, "Testing for linearizability", Concurrency and Computation 29(4), 2017). Parts of a history
that are independent in the model are searched separately. Two rules prune the search:

* If an operation has returned, is possible now and never changes the state, it comes next. In any
  order in which this operation comes later, it can be moved to this position.
* Of several pending operations with equal inputs, only the first called can come next. In any order
  with another of these operations at this position, the two can be exchanged.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from vmckpt_lab.history.history import Input, Operation

State = TypeVar("State", bound=Hashable)
MOST_CONFIGURATIONS = 1_000_000
"""Default limit of a search; each configuration takes about 250 bytes."""
_LOOK_AT_CLOCK = 256
"""Number of steps between checks of the time limit."""
_SHOWN = 6
"""Maximum number of ordered operations that an explanation shows before the culprit."""


class Model(Protocol[State]):
    """A sequential specification."""

    @property
    def start(self) -> State:
        """The state before the first operation."""

    def parts(self, operations: Iterable[Operation]) -> Mapping[str, tuple[Operation, ...]]:
        """Return the operations as independent, named parts. May drop pending operations."""

    def step(self, state: State, operation: Operation) -> State | None:
        """Return the state after an operation; None if its output is impossible in this state.

        An output of None stands for any output. The result must be unique.
        """

    def changes(self, operation: Operation) -> bool:
        """Return whether the operation can change a state in which it is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearizable:
    """The history is linearizable."""

    orders: Mapping[str, tuple[Operation, ...]]
    """An order for each part, including the pending operations that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLinearizable:
    """The history is not linearizable. The explanation covers it up to the culprit's return."""

    part: str
    culprit: Operation
    """The operation whose return cannot be explained. The history before this return is
    linearizable, unless the search for the culprit ran out of time."""
    prefix: tuple[Operation, ...]
    """The longest order that was found for the other operations."""
    state: str
    """The state after `prefix`."""
    unplaced: tuple[Operation, ...]
    """Operations, one of which must come next although none can; includes the culprit."""

    def __str__(self) -> str:
        first = min(one.call for one in (*self.prefix, *self.unplaced))
        said = [f"{self.part}: no order of the operations explains {self.culprit.shown(first)}."]
        shown = self.prefix[-_SHOWN:]
        if shown:
            before = len(self.prefix) - len(shown)
            said.append(f"The longest order found, after {before} other operations:")
            said += [f"  {one.shown(first)}" for one in shown]
        said.append(f"The state is then {self.state}. None of these operations can come next:")
        said += [f"  {one.shown(first)}" for one in self.unplaced]
        return "\n".join(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The search hit its time or memory limit without a result."""

    part: str
    why: str


Verdict = Linearizable | NotLinearizable | Unknown


def check(
    operations: Iterable[Operation],
    model: Model[State],
    over: Callable[[], bool],
    *,
    most: int = MOST_CONFIGURATIONS,
) -> Verdict:
    """Check operations against a model, and return the verdict.

    `over`: returns whether the time limit has passed. `most`: memory limit, in configurations per
    part. If a part is not linearizable, the history is not, even if other parts are unknown.
    """
    checker = _Checker(model, over, most)
    orders: dict[str, tuple[Operation, ...]] = {}
    unknown: Unknown | None = None
    for name, part in model.parts(operations).items():
        try:
            found = checker.search(part)
        except _GaveUp as exc:
            unknown = unknown or Unknown(part=name, why=str(exc))
            continue
        if isinstance(found, _DeadEnd):
            return checker.explained(name, part, found)
        orders[name] = found
    return unknown or Linearizable(orders=orders)


class _GaveUp(Exception):
    """The search hit its time or memory limit."""


@dataclass(frozen=True, slots=True)
class _DeadEnd(Generic[State]):
    """The longest order found, and the operations that could not come next."""

    prefix: tuple[Operation, ...]
    state: State
    unplaced: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class _Checker(Generic[State]):
    """A model, and the limits of each search."""

    model: Model[State]
    over: Callable[[], bool]
    most: int

    def search(self, part: Iterable[Operation]) -> tuple[Operation, ...] | _DeadEnd[State]:
        """Return an order of all returned operations, or a dead end. Raises _GaveUp."""
        return _Search(part, self).run()

    def explained(
        self, name: str, part: Sequence[Operation], found: _DeadEnd[State]
    ) -> NotLinearizable:
        """Explain a dead end with the shortest prefix of the part that is not linearizable.

        A binary search finds the return at which this prefix ends: if a prefix of a history is not
        linearizable, no longer prefix is linearizable. If the time runs out, the explanation is
        longer than necessary.
        """
        ends = sorted({one.returned for one in part if one.returned is not None})
        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high) // 2
            try:
                tried = self.search(_until(part, ends[middle]))
            except _GaveUp:
                break
            if isinstance(tried, _DeadEnd):
                high, found = middle, tried
            else:
                low = middle + 1
        last = [one for one in (*found.unplaced, *part) if one.returned == ends[high]]
        return NotLinearizable(
            part=name,
            culprit=last[0],
            prefix=found.prefix,
            state=str(found.state),
            unplaced=found.unplaced,
        )


def _until(part: Sequence[Operation], end: float) -> tuple[Operation, ...]:
    """Return a part as of the time `end`: operations that returned later are pending."""
    return tuple(
        one
        if one.returned is not None and one.returned <= end
        else replace(one, returned=None, output=None)
        for one in part
        if one.call <= end
    )


@dataclass(slots=True)
class _Node(Generic[State]):
    """A configuration, and the moves that remain to be tried from it."""

    base: int
    """Index of the first returned operation, by time of call, that is not ordered yet."""
    window: int
    """Bit mask of the ordered operations from `base` on. It is short, as concurrency is limited."""
    used: int
    """Bit mask of the pending operations that are ordered."""
    state: State
    came: Operation | None
    """The operation that leads to this configuration."""
    moves: list[tuple[int, State]]
    """Operations that can come next, the best one last, each with the state after it. Completed
    operations are numbered from 0 upwards, pending operations from -1 downwards."""


class _Search(Generic[State]):
    """A search for an order of a part. Used once."""

    def __init__(self, part: Iterable[Operation], checker: _Checker[State]) -> None:
        known = sorted(part, key=lambda one: one.call)
        self._done = [one for one in known if one.returned is not None]
        self._ends = [one.returned for one in known if one.returned is not None]
        self._reads = [not checker.model.changes(one) for one in self._done]
        self._pending = [one for one in known if one.returned is None]
        self._start = checker.model.start
        self._step = checker.model.step
        self._over, self._most = checker.over, checker.most
        self._known: set[tuple[int, int, int, State]] = set()
        self._best = (-1, 0)
        self._dead_end: _DeadEnd[State] = _DeadEnd((), self._start, ())

    def run(self) -> tuple[Operation, ...] | _DeadEnd[State]:
        """Return an order of all returned operations, or the farthest dead end. Raises _GaveUp."""
        path = [self._node(0, 0, 0, self._start, None)]
        steps = 0
        while path:
            node = path[-1]
            if node.base == len(self._done):
                return _order(path)
            if not node.moves:
                self._note(path)
                path.pop()
                continue
            steps += 1
            if steps % _LOOK_AT_CLOCK == 0 and self._over():
                raise _GaveUp("the check ran out of time")
            after = self._after(node, *node.moves.pop())
            if after is not None:
                path.append(after)
        return self._dead_end

    def _after(self, node: _Node[State], move: int, state: State) -> _Node[State] | None:
        """Return the configuration after a move; None if it was tried before. Raises _GaveUp."""
        base, window, used = node.base, node.window, node.used
        if move >= 0:
            window |= 1 << move - base
            while window & 1:
                window >>= 1
                base += 1
        else:
            used |= 1 << ~move
        configuration = (base, window, used, state)
        if configuration in self._known:
            return None
        if len(self._known) >= self._most:
            raise _GaveUp(f"the check exceeded {self._most} configurations")
        self._known.add(configuration)
        came = self._done[move] if move >= 0 else self._pending[~move]
        return self._node(base, window, used, state, came)

    def _node(
        self, base: int, window: int, used: int, state: State, came: Operation | None
    ) -> _Node[State]:
        open_, limit = self._open(base, window)
        moves: list[tuple[int, State]] = []
        for move in open_:
            after = self._step(state, self._done[move])
            if after is not None and self._reads[move]:
                return _Node(base, window, used, state, came, [(move, after)])
            if after is not None:
                moves.append((move, after))
        moves.sort(key=lambda one: -self._ends[one[0]])
        return _Node(
            base, window, used, state, came, [*self._pending_moves(used, state, limit), *moves]
        )

    def _open(self, base: int, window: int) -> tuple[list[int], float]:
        """Return the completed operations that may come next, and the time of the first return."""
        found: list[int] = []
        limit = float("inf")
        left = ~window
        while True:
            number = base + (left & -left).bit_length() - 1
            if number >= len(self._done) or self._done[number].call > limit:
                return found, limit
            found.append(number)
            limit = min(limit, self._ends[number])
            left &= left - 1

    def _pending_moves(self, used: int, state: State, limit: float) -> list[tuple[int, State]]:
        moves: list[tuple[int, State]] = []
        equal: set[Input] = set()
        for number, one in enumerate(self._pending):
            if one.call > limit:
                break
            if used >> number & 1 or one.input in equal:
                continue
            equal.add(one.input)
            after = self._step(state, one)
            if after is not None and after != state:
                moves.append((~number, after))
        return moves[::-1]

    def _note(self, path: Sequence[_Node[State]]) -> None:
        """Keep the dead end that orders the most operations.

        Among equals, keep the dead end that uses the fewest pending operations.
        """
        node = path[-1]
        ordered = (node.base + node.window.bit_count(), -node.used.bit_count())
        if ordered > self._best:
            open_, _ = self._open(node.base, node.window)
            unplaced = sorted(open_, key=self._ends.__getitem__)
            self._best = ordered
            self._dead_end = _DeadEnd(
                _order(path), node.state, tuple(self._done[one] for one in unplaced)
            )


def _order(path: Sequence[_Node[State]]) -> tuple[Operation, ...]:
    return tuple(one.came for one in path if one.came is not None)
