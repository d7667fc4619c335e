"""Histories that one copy can have, and others: the search that tells them apart."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import Broken, World, untold
from vmckpt_lab.history.history import Input, Kind, Operation
from vmckpt_lab.history.key_value import KeyValue
from vmckpt_lab.history.linearizability import Linearizable, NotLinearizable, Unknown, check
from vmckpt_lab.history.recorder import check_runs


def never() -> bool:
    return False


def op(
    kind: Kind,
    call: float,
    returned: float | None,
    output: int | None = None,
    *,
    value: int = 0,
    expected: int = 0,
    key: int = 0,
    snapshot: str = "",
    client: int = 0,
) -> Operation:
    asked = Input(kind=kind, key=key, value=value, expected=expected, snapshot=snapshot)
    return Operation(
        client=client, input=asked, call=call, returned=returned, output=output,
        run=0 if returned is None else 1,
    )  # fmt: skip


def read(
    call: float, returned: float | None, output: int | None = None, *, key: int = 0
) -> Operation:
    return op(Kind.READ, call, returned, output, key=key)


def write(call: float, returned: float | None, value: int, *, key: int = 0) -> Operation:
    return op(Kind.WRITE, call, returned, value=value, key=key)


def cas(
    call: float, returned: float | None, expected: int, value: int, output: int | None = None
) -> Operation:
    return op(Kind.CAS, call, returned, output, value=value, expected=expected)


def add(call: float, returned: float | None, output: int | None = None) -> Operation:
    return op(Kind.ADD, call, returned, output, value=1)


def snapshot(call: float, returned: float | None, name: str = "s") -> Operation:
    return op(Kind.SNAPSHOT, call, returned, snapshot=name)


def restore(call: float, returned: float | None, name: str = "s") -> Operation:
    return op(Kind.RESTORE, call, returned, snapshot=name)


GOOD = {
    "nothing": [],
    "one after the other": [write(0, 1, 5), read(2, 3, 5)],
    "a read beside a write sees the old value": [write(0, 9, 5), read(1, 2, 0)],
    "a read beside a write sees the new value": [write(0, 9, 5), read(1, 2, 5)],
    "two writes beside each other": [write(0, 9, 5), write(1, 8, 6), read(10, 11, 5)],
    "a pending write was carried out": [write(0, None, 5), read(1, 2, 5)],
    "a pending write was not carried out": [write(0, None, 5), read(1, 2, 0)],
    "a pending write is carried out late": [write(0, None, 5), read(1, 2, 0), read(3, 4, 5)],
    "of two comparisons one finds what it expects": [cas(0, 9, 0, 5, 0), cas(1, 8, 0, 6, 5)],
    "a comparison in vain changes nothing": [cas(0, 1, 7, 5, 0), read(2, 3, 0)],
    "a counter": [add(0, 5, 1), add(0, 5, 0), read(6, 7, 2)],
    "a pending addition in between": [add(0, 1, 0), add(0, None), add(2, 3, 2)],
    "keys apart": [write(0, 1, 5), read(2, 3, 0, key=1)],
    "a return and a call at one instant are beside each other": [write(0, 1, 5), read(1, 2, 0)],
    "a restore": [write(0, 1, 5), snapshot(2, 3), write(4, 5, 6), restore(6, 7), read(8, 9, 5)],
    "a snapshot beside a write": [
        snapshot(0, 9), write(1, 2, 5), write(10, 11, 6), restore(12, 13), read(14, 15, 5),
    ],
    "a restore that never came": [
        write(0, 1, 5), snapshot(2, 3), write(4, 5, 6), restore(6, None), read(8, 9, 6),
    ],
    "a write of what is there already": [
        write(0, 1, 5), write(2, 9, 5), write(2, 9, 6), read(10, 11, 5),
    ],
    "a restore of what is there already": [restore(0, 9), write(0, 9, 5), read(10, 11, 0)],
    "a restore of what is older": [write(0, 1, 5), restore(2, 3, "older"), read(4, 5, 0)],
}  # fmt: skip


@pytest.mark.parametrize("operations", GOOD.values(), ids=list(GOOD))
def test_what_one_copy_can_have_answered_has_an_order(operations: list[Operation]) -> None:
    found = check(operations, KeyValue(), never)

    assert isinstance(found, Linearizable)
    for part, order in found.orders.items():
        held = KeyValue().parts(operations)[part]
        assert {one for one in held if one.returned is not None} <= set(order)
        assert allowed(order)


BAD = {
    "a stale read": ([write(0, 1, 5), write(2, 3, 6), read(4, 5, 5)], 2),
    "a lost write": ([write(0, 1, 5), read(2, 3, 0)], 1),
    "a value that was never written": ([read(0, 1, 5)], 0),
    "two reads that saw two writes in two orders": (
        [write(0, 9, 5), write(0, 9, 6), read(1, 2, 5), read(3, 4, 6), read(5, 6, 5)], 4,
    ),
    "two comparisons that both found what they expect": (
        [cas(0, 9, 0, 5, 0), cas(1, 8, 0, 6, 0)], 0,
    ),
    "a counter that counts one twice": ([add(0, 1, 0), add(2, 3, 0)], 1),
    "a pending write that is carried out twice": (
        [write(0, None, 5), read(1, 2, 5), write(3, 4, 6), read(5, 6, 5)], 3,
    ),
    "a pending addition that is counted twice": ([add(0, None), read(1, 2, 1), read(3, 4, 2)], 2),
    "a write that a restore should have undone": (
        [snapshot(0, 1), write(2, 3, 5), restore(4, 5), read(6, 7, 5)], 3,
    ),
    "a snapshot that lost a write": (
        [write(0, 1, 5), snapshot(2, 3), restore(4, 5), read(6, 7, 0)], 3,
    ),
    "another key's trouble": ([write(0, 1, 5), read(2, 3, 5), read(2, 3, 9, key=1)], 2),
}  # fmt: skip


@pytest.mark.parametrize(("operations", "culprit"), BAD.values(), ids=list(BAD))
def test_what_one_copy_cannot_have_answered_is_found_and_explained(
    operations: list[Operation], culprit: int
) -> None:
    found = check(operations, KeyValue(), never)

    assert isinstance(found, NotLinearizable)
    assert found.culprit == operations[culprit]
    assert found.unplaced
    assert allowed(found.prefix)
    # Without what was answered last there is an order.
    told = [
        replace(one, returned=None, output=None) if one is operations[culprit] else one
        for one in operations
        if one.call <= (operations[culprit].returned or 0.0)
    ]
    assert isinstance(check(told, KeyValue(), never), Linearizable)


def test_an_explanation_names_what_does_not_fit_and_what_came_before() -> None:
    found = check(
        [write(10, 11, 5), write(12, 13, 6), read(14, 15, 5), read(16, 17, 6)], KeyValue(), never
    )

    assert str(found).splitlines() == [
        "key 0: no order of the operations explains client 0: read key 0, was 5"
        " (called 4.0000, returned 5.0000).",
        "The longest order found, after 0 other operations:",
        "  client 0: write 5 to key 0 (called 0.0000, returned 1.0000)",
        "  client 0: write 6 to key 0 (called 2.0000, returned 3.0000)",
        "The state is then Cell(value=6, kept=()). None of these operations can come next:",
        "  client 0: read key 0, was 5 (called 4.0000, returned 5.0000)",
    ]


def test_an_explanation_has_no_pending_operation_that_does_not_help() -> None:
    known = [write(0, 1, 5), write(2, None, 7), cas(2, None, 7, 8), read(3, 4, 6), read(9, 10, 8)]
    found = check(known, KeyValue(), never)

    assert isinstance(found, NotLinearizable)
    assert found.prefix == (known[0],)


# Values that are written, read and expected: few, so that they meet.
VALUES = st.integers(0, 2)


@st.composite
def an_operation(draw: st.DrawFn) -> Operation:
    call = draw(st.integers(0, 8))
    pending = draw(st.integers(0, 4)) == 0
    kind = draw(st.sampled_from([*Kind, Kind.READ, Kind.WRITE, Kind.CAS]))
    operator = kind in (Kind.SNAPSHOT, Kind.RESTORE)
    return op(
        kind, call, None if pending else call + draw(st.integers(1, 4)),
        None if pending or operator else draw(st.one_of(st.none(), VALUES)),
        value=draw(VALUES), expected=draw(VALUES), snapshot="s" if operator else "",
        client=draw(st.integers(0, 99)),
    )  # fmt: skip


def allowed(order: Iterable[Operation]) -> bool:
    """Whether the model allows it, and none is behind one that was called after its return."""
    state = KeyValue.start
    latest = float("-inf")
    for one in order:
        latest = max(latest, one.call)
        if one.returned is not None and one.returned < latest:
            return False
        after = KeyValue().step(state, one)
        if after is None:
            return False
        state = after
    return True


def tried_out(operations: Sequence[Operation]) -> bool:
    """Whether any order of all that returned, and any of the pending ones, is allowed."""
    done = [one for one in operations if one.returned is not None]
    pending = [one for one in operations if one.returned is None]
    some = chain.from_iterable(combinations(pending, n) for n in range(len(pending) + 1))
    return any(allowed(order) for more in some for order in permutations([*done, *more]))


@settings(max_examples=400, deadline=None)
@given(st.lists(an_operation(), max_size=6))
def test_the_search_finds_what_trying_all_orders_finds(operations: list[Operation]) -> None:
    found = check(operations, KeyValue(), never)

    assert isinstance(found, Linearizable) is tried_out(operations)
    if isinstance(found, NotLinearizable):
        assert allowed(found.prefix)
        assert found.culprit in operations


class Queue:
    """A queue as a model. A read takes out what it reads, and 0 from an empty one."""

    start: tuple[int, ...] = ()

    def parts(self, operations: Iterable[Operation]) -> Mapping[str, tuple[Operation, ...]]:
        return {"queue": tuple(operations)}

    def step(self, state: tuple[int, ...], operation: Operation) -> tuple[int, ...] | None:
        if operation.input.kind is Kind.WRITE:
            return (*state, operation.input.value)
        if operation.output not in (None, state[0] if state else 0):
            return None
        return state[1:]

    def changes(self, operation: Operation) -> bool:
        return operation.input.kind is Kind.WRITE or operation.output != 0


@pytest.mark.parametrize(
    ("operations", "linearizable"),
    [
        # After figure 1 of Herlihy and Wing's paper.
        ([write(0, 3, 1), write(1, 4, 2), read(5, 7, 2), read(6, 9, 1), write(8, 10, 3)], True),
        ([write(0, 1, 1), write(2, 4, 2), read(3, 5, 2)], False),
        ([write(0, 3, 1), read(1, 4, 1)], True),
        ([write(0, 2, 1), write(1, 3, 2), read(4, 6, 2), read(5, 7, 2)], False),
    ],
)
def test_another_model_is_checked_as_well(operations: list[Operation], linearizable: bool) -> None:
    assert isinstance(check(operations, Queue(), never), Linearizable) is linearizable


def test_a_search_without_time_or_memory_knows_nothing() -> None:
    many = [write(0, 100, n + 1) for n in range(12)] + [read(101, 102, 99)]

    late = check([*many, *many], KeyValue(), lambda: True)
    assert late == Unknown(part="key 0", why="the check ran out of time")
    full = check(many, KeyValue(), never, most=50)
    assert full == Unknown(part="key 0", why="the check exceeded 50 configurations")


def test_what_is_wrong_with_one_key_counts_though_another_is_unknown() -> None:
    many = [write(0, 100, n + 1) for n in range(12)] + [read(101, 102, 99)]
    lost = [write(0, 1, 5, key=1), read(2, 3, 0, key=1)]

    assert isinstance(check([*many, *lost], KeyValue(), never, most=50), NotLinearizable)


def test_many_pending_operations_that_are_alike_cost_little() -> None:
    pending = [add(n / 10, None) for n in range(60)]
    more = [add(100 + n, 100.5 + n, 2 * n) for n in range(30)]

    assert isinstance(check([*pending, *more], KeyValue(), never, most=5000), Linearizable)


def test_pending_writes_that_nobody_saw_cost_nothing() -> None:
    pending = [write(n / 10, None, 1000 + n) for n in range(60)]
    known = [write(100, 101, 5), read(102, 103, 6)]

    assert isinstance(check([*pending, *known], KeyValue(), never, most=50), NotLinearizable)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dies", [None, 3.0])
def test_a_failover_that_keeps_its_promise_is_linearizable(seed: int, dies: float | None) -> None:
    known = World(seed, dies=dies).play(8.0)

    assert known.answered > 150
    assert (known.pending > 0) or dies is None
    for one in (known, untold(known)):
        found = check_runs(one, never)
        assert (found.wrong, found.unknown) == ((), ())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("broken", Broken)
def test_a_failover_that_breaks_its_promise_is_found(seed: int, broken: Broken) -> None:
    known = World(seed, dies=3.0, broken=broken).play(8.0)
    found = check_runs(known, never)

    assert "not linearizable" in " ".join(found.wrong)


@pytest.mark.parametrize("broken", Broken)
def test_ordinary_registers_betray_it_as_well(broken: Broken) -> None:
    seen = [
        check_runs(untold(World(seed, dies=3.0, broken=broken).play(8.0)), never)
        for seed in range(4)
    ]

    assert all(one.wrong and not one.unknown for one in seen)


def test_what_is_acknowledged_and_lost_in_a_failover_is_named() -> None:
    known = World(1, dies=3.0).play(8.0)
    before = max(
        (one for one in known.operations if one.returned is not None and one.returned < 3.0),
        key=lambda one: one.returned or 0.0,
    )
    # Another client was told of a write right before the host died, and the backup knows nothing.
    lost = replace(
        before, input=Input(kind=Kind.WRITE, key=before.input.key, value=12345), call=2.999,
        returned=2.9995, output=None,
    )  # fmt: skip
    changed = replace(known, operations=(*known.operations, lost))

    assert check_runs(known, never).wrong == ()
    (wrong,) = check_runs(changed, never).wrong
    assert "write 12345 to key" in wrong
