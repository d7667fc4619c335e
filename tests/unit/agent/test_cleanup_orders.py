"""Orders for what a restore has left are read as they were given, and no others."""

import json

import pytest

from vmckpt.agent import main
from vmckpt.agent.cleanup_orders import DiscardOrder, FinishOrder

DISCARD = DiscardOrder(snapshot="s-1", images={"vda": "/images/fork-vda.qcow2"})
FINISH = FinishOrder(guest="u-1", host="alpha", dry=True)


@pytest.mark.parametrize("order", [DISCARD, FINISH])
def test_an_order_is_read_as_it_was_given(order: DiscardOrder | FinishOrder) -> None:
    told = json.loads(json.dumps(order.as_json()))
    reads = main.named(main.ORDERS[told["do"]][0])
    assert reads is type(order)
    assert reads.from_json(told) == order


def test_it_is_more_than_a_look_unless_that_is_said() -> None:
    told = FINISH.as_json()
    del told["dry"]
    assert not FinishOrder.from_json(told).dry


@pytest.mark.parametrize("order", [DISCARD, FINISH])
def test_one_with_more_in_it_is_refused(order: DiscardOrder | FinishOrder) -> None:
    with pytest.raises(TypeError, match="surprise"):
        type(order).from_json(order.as_json() | {"surprise": 1})
