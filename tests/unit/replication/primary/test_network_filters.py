"""Names of filters, the order in which they can be removed, and when QEMU's timer matters."""

import pytest

from vmckpt.replication.primary import network_filters
from vmckpt.replication.primary.network_filters import LONGEST, Filter, Kind
from vmckpt.units import Seconds


def test_a_filter_is_found_by_its_name_and_others_are_not_ours() -> None:
    ours = [Filter(Kind.HOLDING, "net0"), Filter(Kind.HOLDING, "ua-7-net", 12)]
    names = [one.name for one in ours]
    assert names == ["vmckpt-holding-net0", "vmckpt-holding12-ua-7-net"]
    others = ["vmckpt-hold-net0", "holding-net0", "pc.ram", "vmckpt-mirror-0"]
    assert network_filters.found([*others, *names]) == ours


def test_what_is_nearest_to_the_guest_is_removed_first_but_for_the_sink() -> None:
    names = [
        "vmckpt-holding3-net0", "vmckpt-sink-net0", "vmckpt-collecting-net0",
        "vmckpt-holding2-net0", "vmckpt-count-net0",
    ]  # fmt: skip
    assert [one.name for one in network_filters.found(names)] == [
        "vmckpt-sink-net0", "vmckpt-count-net0", "vmckpt-collecting-net0",
        "vmckpt-holding2-net0", "vmckpt-holding3-net0",
    ]  # fmt: skip


def test_packets_of_a_card_that_is_gone_are_discarded() -> None:
    names = [f"vmckpt-{kind}-{card}" for card in ("net0", "net1") for kind in Kind]
    order = [one.name for one in network_filters.found(names, {"net0"})]
    assert order[0] == "vmckpt-sink-net1"
    assert order[-1] == "vmckpt-sink-net0"


def test_of_two_buffers_the_one_that_came_later_counts() -> None:
    three = [Filter(Kind.HOLDING, "net0", place) for place in (2, 10, 9)]
    assert network_filters.last(three) == {(Kind.HOLDING, "net0"): three[1]}
    assert three[1].next == Filter(Kind.HOLDING, "net0", 11)


@pytest.mark.parametrize(
    ("waited", "due", "fired"),
    [(0, False, False), (500, False, False), (540, True, False), (4290, True, False),
     (4295, True, True)],
)  # fmt: skip
def test_a_buffer_is_replaced_long_before_its_timer_fires(
    waited: float, due: bool, fired: bool
) -> None:
    assert network_filters.due(100.0, 100.0 + waited, LONGEST) is due
    assert network_filters.may_have_fired(100.0, 100.0 + waited, LONGEST) is fired


def test_a_short_interval_is_for_tests() -> None:
    assert network_filters.due(0.0, 0.25, Seconds(2.0))
