"""Check a history for linearizability: can one copy that does one thing at a time answer so? Pure.

A history is linearizable if its operations have an order that a sequential model allows and in
which an operation that returned before another one was called comes before it (Herlihy and Wing,
"Linearizability: A Correctness Condition for Concurrent Objects", TOPLAS 12(3), 1990).

The search tries orders as Wing and Gong do ("Testing and Verifying Concurrent Objects", JPDC 17,
1993): any operation may come next that was called before the first of the others returned. It never
enters a configuration twice, that is, the same set of ordered operations with the same state (Lowe,
"Testing for linearizability", Concurrency and Computation 29(4), 2017). Parts of a history that the
model calls independent are searched one by one. Two rules leave out orders that need no try:

* An operation that has returned, is possible now and never changes the state comes next. In any
  order that has it later it can be moved to here.
* Of pending operations with equal inputs only the one that was called first comes next. In any
  order that has a later one here the two can be exchanged.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from vmckpt_lab.history.history import Input, Operation

State = TypeVar("State", bound=Hashable)
MOST_CONFIGURATIONS = 1_000_000
"""Of one search; each takes about 250 bytes."""
_LOOK_AT_CLOCK = 256
"""Steps between two questions whether the time is over."""
_SHOWN = 6
"""Operations that an explanation shows of the order before the one that does not fit."""


class Model(Protocol[State]):
    """A sequential specification."""

    @property
    def start(self) -> State:
        """The state before the first operation."""

    def parts(self, operations: Iterable[Operation]) -> Mapping[str, tuple[Operation, ...]]:
        """Split operations into independent parts, each with a name. May drop pending ones."""

    def step(self, state: State, operation: Operation) -> State | None:
        """Carry out an operation. Returns the state after it; None: this output is impossible.

        An output of None stands for any output. The step must have one result only.
        """

    def changes(self, operation: Operation) -> bool:
        """Whether there is any state that the operation is possible in and changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearizable:
    """There is such an order."""

    orders: Mapping[str, tuple[Operation, ...]]
    """One for each part, with those pending operations that were needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLinearizable:
    """There is none. The history is cut off behind the culprit's return."""

    part: str
    culprit: Operation
    """The operation whose return cannot be explained. Right before it there was an order, unless
    the time ended while this place was looked for."""
    prefix: tuple[Operation, ...]
    """The longest order found of the others."""
    state: str
    """After that."""
    unplaced: tuple[Operation, ...]
    """Operations that had to come next, the culprit among them, and cannot."""

    def __str__(self) -> str:
        first = min(one.call for one in (*self.prefix, *self.unplaced))
        said = [f"{self.part}: no order of the operations explains {self.culprit.shown(first)}."]
        shown = self.prefix[-_SHOWN:]
        if shown:
            before = len(self.prefix) - len(shown)
            said.append(f"The longest order found, after {before} others:")
            said += [f"  {one.shown(first)}" for one in shown]
        said.append(f"Then the state is {self.state}, and none of these can come next:")
        said += [f"  {one.shown(first)}" for one in self.unplaced]
        return "\n".join(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The search was ended before it found out."""

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
    """Check operations against a model.

    `over` says whether the time for the answer is over; `most` bounds the memory, in configurations
    of one part. A part that is not linearizable decides, whatever is unknown of others.
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
    """The search has no time or no memory left."""


@dataclass(frozen=True, slots=True)
class _DeadEnd(Generic[State]):
    """The longest order that was found, and what could not come next."""

    prefix: tuple[Operation, ...]
    state: State
    unplaced: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class _Checker(Generic[State]):
    """A model, and the bounds of each search."""

    model: Model[State]
    over: Callable[[], bool]
    most: int

    def search(self, part: Iterable[Operation]) -> tuple[Operation, ...] | _DeadEnd[State]:
        """Returns an order of all that returned, or the longest one found. Raises _GaveUp."""
        return _Search(part, self).run()

    def explained(
        self, name: str, part: Sequence[Operation], found: _DeadEnd[State]
    ) -> NotLinearizable:
        """Cut the part off behind the first return with which it is not linearizable.

        A history whose beginning is not linearizable is not either, so that halving finds the
        place. If the time ends meanwhile, the explanation is larger than it need be.
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
    """What was known of a part at a time: what had not returned by then was pending."""
    return tuple(
        one
        if one.returned is not None and one.returned <= end
        else replace(one, returned=None, output=None)
        for one in part
        if one.call <= end
    )


@dataclass(slots=True)
class _Node(Generic[State]):
    """A configuration, and what is still to be tried from there."""

    base: int
    """The first of the returned operations, by their calls, that is not ordered yet."""
    window: int
    """Which of those behind `base` are, bit by bit; at most as many as run at once."""
    used: int
    """Which of the pending ones are."""
    state: State
    came: Operation | None
    """The operation that leads here."""
    moves: list[tuple[int, State]]
    """Operations that can come next, the best one last, and the state after each. Those that have
    returned are counted from 0, pending ones from -1 downwards."""


class _Search(Generic[State]):
    """One search of one part. A new one for each."""

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
        """Returns an order, or the longest one if there is none of all. Raises _GaveUp."""
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
                raise _GaveUp("the time for the check is over")
            after = self._after(node, *node.moves.pop())
            if after is not None:
                path.append(after)
        return self._dead_end

    def _after(self, node: _Node[State], move: int, state: State) -> _Node[State] | None:
        """The configuration after a move; None if it was tried before. Raises _GaveUp."""
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
            raise _GaveUp(f"more than {self._most} configurations")
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
        """The returned operations that may come next, and when the first of them returned."""
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
        """Keep a dead end if it is farther than all before, or as far with fewer pending ones."""
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
