"""Orders of a controller are on the host what they were before, with their kind and folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.restore_orders import order
from vmckpt.agent import main
from vmckpt.agent.orders import (
    CardsOrder,
    CountOrder,
    CreateOrder,
    PutBackOrder,
    ReplicaOrder,
    RestoreOrder,
    UnrestoreOrder,
)
from vmckpt.model.disk import StorePlace

NEAR = StorePlace(name="near", url="/x", id="1")
CREATE = CreateOrder(
    guest="u-1", uri="", host="alpha", store=NEAR, state="/state", snapshot="s-1", name="nightly",
    by="root", owner="7", memory=True, tags={"a": "b"}, group=None, salt="00", admins=("11", "22"),
    signer="33",
)  # fmt: skip
PUT_BACK = PutBackOrder(
    guest="u-1", uri="", host="alpha", store=NEAR, state="/state", snapshot="s-1",
    capture="{}", backup=None, freeze=None, dry=True,
)  # fmt: skip
UNRESTORE = UnrestoreOrder(
    guest="u-1", uri="", host="alpha", state="/state", snapshot="s-1", images={"vda": "/vda"},
    made={"vda": "1:2"}, empty=("vda",),
)  # fmt: skip
REPLICA = ReplicaOrder(
    what="begin", guest="u-1", uri="", host="alpha", images={"vda": ["/vda", "raw"]}, files=["/f"]
)
COUNT = CountOrder(guest="u-1", uri="", host="alpha", times=(0.1, 1.0))
CARDS = CardsOrder(what="look", guest="u-1", uri="", host="alpha", cards=("52:54:00:00:00:01",))


def restore_order(**more: Any) -> RestoreOrder:
    told = order(Path("/images")).as_json() | {"state": "/state", "trusted": ["44"]} | more
    return RestoreOrder.from_json(told)


@pytest.mark.parametrize(
    "told",
    [CREATE, PUT_BACK, restore_order(), UNRESTORE, REPLICA, COUNT, CARDS],
    ids=lambda it: type(it).__name__,
)
def test_an_order_is_read_as_it_was_given_by_whoever_carries_out_its_kind(told: Any) -> None:
    heard = json.loads(json.dumps(told.as_json()))
    reads = main.named(main.ORDERS[heard["do"]][0])
    assert reads is type(told)
    assert reads.from_json(heard) == told


def test_other_stores_of_a_restore_are_stores_there_too() -> None:
    others = [{"name": "far", "url": "s3://far", "id": None}]
    assert restore_order(others=others).others == (StorePlace(name="far", url="s3://far"),)


def test_what_a_snapshot_and_a_restore_leave_lies_apart_in_the_agents_state() -> None:
    assert CREATE.folder == PUT_BACK.folder == Path("/state/spool/s-1")
    assert CREATE.line == Path("/state/lines/u-1-near")
    assert UNRESTORE.folder == Path("/state/spool/restore-s-1")
    assert restore_order(snapshot="s-1").folder == UNRESTORE.folder


@pytest.mark.parametrize("wrong", [{"surprise": 1}, {"admins": None}, {"store": {"name": "near"}}])
def test_an_order_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        CreateOrder.from_json(CREATE.as_json() | wrong)
