"""What modes may do, and an order that is given again by whoever goes on with it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine_runs import ORDER
from vmckpt.model.migration import AutoConverge, Compression, Mode, MoveOrder
from vmckpt.units import Bytes

FULL = replace(
    ORDER, post_copy=True, auto_converge=AutoConverge(initial=20, increment=10, at_most=60),
    compression=Compression.XBZRLE, xbzrle_cache=Bytes(1 << 26), copied_disks=("vda", "vdb"),
    tls_name="beta", target_xml="<domain/>", target_definition="<domain/>",
)  # fmt: skip


@pytest.mark.parametrize("mode", Mode)
def test_only_what_can_be_post_copy_may_switch_early(mode: Mode) -> None:
    assert mode.may_switch_early is (mode in (Mode.POSTCOPY, Mode.HYBRID))


def test_an_order_is_the_same_after_the_journal_but_for_definitions() -> None:
    stored = json.loads(json.dumps(FULL.as_json()))

    assert MoveOrder.from_json(stored) == replace(FULL, target_xml=None, target_definition=None)
    assert "<domain/>" not in json.dumps(stored)


@pytest.mark.parametrize(
    "changed",
    [
        {"driver": "a horse"}, {"persistent": 1}, {"connections": True}, {"bandwidth": -1},
        {"bandwidth": 1 << 61}, {"copied_disks": "vda"}, {"copied_disks": [1]}, {"tls_name": 7},
        {"auto_converge": {"initial": "x", "increment": 1, "at_most": 1}},
        {"auto_converge": {"initial": 1}},
    ],
)  # fmt: skip
def test_what_is_no_order_is_not_taken_for_one(changed: dict[str, Any]) -> None:
    stored = json.loads(json.dumps(FULL.as_json())) | changed

    with pytest.raises((TypeError, KeyError, ValueError)):
        MoveOrder.from_json(stored)
