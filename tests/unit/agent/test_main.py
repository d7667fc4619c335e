"""Each order that an agent may get is read and carried out by something that is there."""

import pytest

from vmckpt.agent import main


@pytest.mark.parametrize("kind", main.ORDERS)
def test_each_order_can_be_read_and_carried_out(kind: str) -> None:
    reads, does = (main.named(one) for one in main.ORDERS[kind])
    assert callable(reads.from_json)
    assert callable(does)
