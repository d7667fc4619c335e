from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.replication.protocol.messages import (
    Ack,
    DeviceState,
    EpochEnd,
    Heartbeat,
    Hello,
    Message,
    Order,
    OutOfOrder,
    Pages,
    Part,
    Replayed,
    Tally,
    WireError,
    Writes,
    digest_of,
)

SMALL = st.integers(0, 2)
DATA = st.binary(max_size=2)
PARTS: st.SearchStrategy[Part] = st.one_of(
    st.builds(Pages, epoch=SMALL, file=SMALL, data=DATA),
    st.builds(Writes, epoch=SMALL, disk=SMALL, data=DATA),
    st.builds(DeviceState, epoch=SMALL, data=DATA),
)
SEAL = EpochEnd(epoch=1, base=0, messages=0, digest=Tally().digest(), final=False, taken=0.0)


def sealed(epoch: int, of: Sequence[Part], *, base: int) -> EpochEnd:
    tally = Tally()
    for part in of:
        tally.add(part)
    return replace(SEAL, epoch=epoch, base=base, messages=tally.count, digest=tally.digest())


@given(PARTS, PARTS)
def test_two_parts_have_one_digest_only_if_they_are_the_same(one: Part, other: Part) -> None:
    assert (digest_of(one) == digest_of(other)) == (one == other)


def test_the_same_data_in_another_kind_or_epoch_has_another_digest() -> None:
    alike: list[Part] = [
        Pages(epoch=1, file=0, data=b"x"),
        Pages(epoch=2, file=0, data=b"x"),
        Pages(epoch=1, file=1, data=b"x"),
        Writes(epoch=1, disk=0, data=b"x"),
        DeviceState(epoch=1, data=b"\0\0\0\0x"),
    ]

    assert len({digest_of(part) for part in alike}) == len(alike)


def epoch(number: int, *, count: int = 3) -> list[Part]:
    return [
        *(Pages(epoch=number, file=0, data=b"%d" % at) for at in range(count - 1)),
        DeviceState(epoch=number, data=b"devices"),
    ]


def taken(order: Order, messages: Sequence[Message]) -> Order:
    for message in messages:
        order.take(message)
    return order


def test_whole_epochs_in_their_order_are_committed() -> None:
    order = Order(0)
    for number, base in ((1, 0), (2, 1), (5, 2)):
        taken(order, [*epoch(number), sealed(number, epoch(number), base=base)])

        assert (order.committed, order.open) == (number, None)


def test_the_bulk_copy_is_in_order_until_something_is_committed() -> None:
    bulk = Pages(epoch=0, file=0, data=b"bulk")
    order = taken(Order(0), [bulk, bulk, *epoch(1), bulk, sealed(1, epoch(1), base=0)])

    with pytest.raises(Replayed):
        order.take(bulk)


def test_what_belongs_to_no_epoch_is_always_in_order() -> None:
    others: list[Message] = [
        Heartbeat(sent=1.0, note=b""),
        Hello(session="", captured=9),
        Ack(epoch=0),
    ]
    messages: list[Message] = [part for one in epoch(6) for part in (*others, one)]

    assert taken(Order(5), [*messages, sealed(6, epoch(6), base=5)]).committed == 6


@pytest.mark.parametrize("number", [1, 4, 5])
def test_an_epoch_that_is_committed_is_replayed(number: int) -> None:
    with pytest.raises(Replayed, match=f"epoch {number} arrived, but epoch 5 is already committed"):
        Order(5).take(epoch(number)[0])
    with pytest.raises(Replayed):
        Order(5).take(sealed(number, [], base=5))


def test_nothing_seals_epoch_0() -> None:
    with pytest.raises(Replayed):
        Order(0).take(sealed(0, [], base=0))


@pytest.mark.parametrize("base", [0, 3, 5, 6])
def test_an_epoch_that_follows_another_one_is_out_of_order(base: int) -> None:
    order = taken(Order(4), epoch(6))

    with pytest.raises(
        OutOfOrder, match=f"epoch 6 follows epoch {base}, but epoch 4 was committed"
    ):
        order.take(sealed(6, epoch(6), base=base))
    assert (order.committed, order.open) == (4, None)


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        pytest.param(epoch(1)[1:], "has 3 parts, but 2 arrived", id="one is missing"),
        pytest.param([*epoch(1), epoch(1)[0]], "has 3 parts, but 4 arrived", id="one came twice"),
        pytest.param(epoch(1)[::-1], "do not match its digest", id="another order"),
        pytest.param(
            [*epoch(1)[:-1], DeviceState(epoch=1, data=b"")], "do not match", id="another state"
        ),
        pytest.param([], "has 3 parts, but 0 arrived", id="nothing"),
        pytest.param(epoch(2), "epoch 2 is open", id="another epoch"),
    ],
)
def test_an_epoch_that_is_not_whole_is_not_committed(sent: list[Part], what: str) -> None:
    order = taken(Order(0), sent)

    with pytest.raises(OutOfOrder, match=what):
        order.take(sealed(1, epoch(1), base=0))
    assert (order.committed, order.open) == (0, None)


def test_a_newer_epoch_takes_the_place_of_the_open_one() -> None:
    order = taken(Order(2), [*epoch(3), *epoch(4), sealed(4, epoch(4), base=2)])

    assert order.committed == 4


def test_an_older_epoch_does_not_take_the_place_of_the_open_one() -> None:
    order = taken(Order(2), epoch(4))

    with pytest.raises(OutOfOrder, match="a part of epoch 3 arrived after parts of epoch 4"):
        order.take(epoch(3)[0])


def test_an_epoch_that_was_cut_off_may_be_sent_again() -> None:
    order = taken(Order(2), epoch(3)[:2])
    order.discard()

    assert taken(order, [*epoch(3), sealed(3, epoch(3), base=2)]).committed == 3


@given(st.lists(st.integers(0, 4), max_size=12), st.data())
def test_whatever_comes_only_whole_epochs_are_committed(
    numbers: list[int], data: st.DataObject
) -> None:
    order, committed, since = Order(0), 0, list[Part]()
    for number in numbers:
        parts_ = epoch(number)[: data.draw(st.integers(0, 3))]
        seal = sealed(number, epoch(number), base=data.draw(st.integers(0, 4)))
        for message in (*parts_, seal):
            before = order.committed
            try:
                order.take(message)
            except WireError:
                since = []
                assert order.committed == before
                continue
            if isinstance(message, EpochEnd):
                assert (before, since) == (committed, epoch(message.epoch))
                assert message.base == committed < message.epoch
                committed, since = message.epoch, []
            elif message.epoch:
                fresh = not since or since[0].epoch != message.epoch
                since = [message] if fresh else [*since, message]
        assert order.committed == committed
