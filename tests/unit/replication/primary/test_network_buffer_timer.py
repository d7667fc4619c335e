"""QEMU's own timers, which let go what a buffer has: nothing gets out by them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import filternet
from tests.support.filternet import CARDS, Net, buffers_of
from tests.support.staging import in_memory
from vmckpt.errors import HypervisorError
from vmckpt.replication.primary.network_buffer import Buffers


@pytest.fixture
def net() -> Iterator[Net]:
    with filternet.network() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as made:
        yield made


@pytest.fixture
def held(net: Net, folder: Path) -> Buffers:
    made = buffers_of(net, folder)
    made.add()
    return made


HOUR = 3600.0


def test_output_that_waits_for_hours_waits_on_if_it_is_kept(net: Net, held: Buffers) -> None:
    """QEMU's timer would let it out after 71.6 minutes of the guest's time, and then again."""
    net.send("net0", 1, 2)
    held.close_epoch()
    net.send("net0", 3)
    for _ in range(6 * 60):
        net.advance(60.0)
        held.keep()
    net.send("net0", 4)
    assert net.wire["net0"] == []
    held.release()
    assert net.wire["net0"] == [1, 2]
    held.close_epoch()
    held.release()
    assert net.wire["net0"] == [1, 2, 3, 4]
    assert held.complete()
    assert len(net.filters) == 4 * len(CARDS)


def test_without_any_process_of_ours_the_sink_discards_what_the_timer_lets_go(
    net: Net, held: Buffers, folder: Path
) -> None:
    net.send("net0", 1)
    held.close_epoch()
    net.send("net0", 2)
    net.advance(6 * HOUR)
    net.send("net0", 3)
    net.advance(6 * HOUR)
    assert net.wire["net0"] == []
    new = buffers_of(net, folder)
    new.attach()
    net.send("net0", 4)
    new.close_epoch()
    new.release()
    assert net.wire["net0"] == [4]


def test_where_qemu_has_no_sink_output_waits_as_long_as_it_is_kept(net: Net, folder: Path) -> None:
    net.types.remove(filternet.REDIRECTOR)
    held = buffers_of(net, folder, "net0")
    held.add()
    assert net.chardevs == []
    net.send("net0", 1)
    held.close_epoch()
    for _ in range(100):
        net.advance(60.0)
        held.keep()
    assert net.wire["net0"] == []
    held.release()
    assert net.wire["net0"] == [1]


def test_an_open_epoch_that_the_timer_mixed_with_a_closed_one_waits_for_the_next(
    net: Net, held: Buffers
) -> None:
    """An agent that hung for an hour and then hears that the closed one is committed."""
    net.send("net0", 1)
    held.close_epoch()
    net.advance(HOUR / 2)
    held.keep()
    net.send("net0", 2)
    net.advance(1.2 * HOUR)
    held.keep()
    held.release()
    assert net.wire["net0"] == []
    net.send("net0", 3)
    held.close_epoch()
    held.release()
    assert set(net.wire["net0"]) <= {1, 2, 3}
    assert held.collected() == 0


def test_buffers_are_replaced_only_when_it_is_time(net: Net, held: Buffers) -> None:
    held.close_epoch()
    before = len(net.events)
    for _ in range(8):
        net.advance(60.0)
        held.keep()
    assert len(net.events) == before
    net.advance(60.0)
    held.keep()
    assert len(net.events) - before == 2 * 2 * len(CARDS)  # added and removed, of two kinds
    held.close_epoch()
    held.release()
    net.advance(400.0)
    before = len(net.events)
    held.keep()
    assert len(net.events) == before


@pytest.mark.parametrize("step", range(1, 5))
def test_an_agent_that_died_while_it_replaced_a_buffer_lets_nothing_out(
    net: Net, held: Buffers, folder: Path, step: int
) -> None:
    del held
    one_card = buffers_of(net, folder, "net0")
    one_card.attach()
    net.send("net0", 1)
    one_card.close_epoch()
    net.send("net0", 2)
    net.advance(HOUR / 2)
    orders = iter(range(step))
    tell = net.tell

    def killed(*words: Any, **more: Any) -> Any:
        if next(orders, None) is None:
            raise HypervisorError("killed", host="alpha")
        return tell(*words, **more)

    with pytest.MonkeyPatch.context() as patch, suppress(HypervisorError):
        patch.setattr(net, "tell", killed)
        one_card.keep()
    net.send("net0", 3)
    new = buffers_of(net, folder, "net0")
    new.attach()
    net.advance(HOUR)
    new.keep()
    net.send("net0", 4)
    new.close_epoch()
    assert net.wire["net0"] == []
    new.release()
    assert net.wire["net0"] == [1, 2, 3, 4]
    assert len([name for name in net.filters if name.endswith("-net0")]) == 4


def test_a_card_that_is_gone_keeps_no_other_from_being_held(net: Net, held: Buffers) -> None:
    for card in CARDS:
        net.send(card, 1)
    held.close_epoch()
    net.unplug("net0")
    for _ in range(100):
        net.advance(60.0)
        held.keep()
    assert net.wire == {"net1": []}
    assert not held.complete()


def test_what_a_card_that_is_gone_has_sent_is_discarded(net: Net, held: Buffers) -> None:
    """QEMU has freed the sender, to whom the packets refer."""
    for card in CARDS:
        net.send(card, 1)
    held.close_epoch()
    assert held.hold_any_of({"net0"})
    assert not held.hold_any_of({"net2"})
    held.remove({"net0"})
    assert net.wire == {"net0": [], "net1": [1]}
    assert (net.filters, net.chardevs) == ({}, [])


def test_a_new_agent_holds_on_to_what_is_left_after_a_card_was_unplugged(
    net: Net, held: Buffers, folder: Path
) -> None:
    net.send("net1", 1)
    held.close_epoch()
    net.unplug("net0")
    new = buffers_of(net, folder)
    new.attach()
    for _ in range(100):
        net.advance(60.0)
        new.keep()
    assert net.wire == {"net1": []}
    new.remove()
    assert net.wire == {"net1": [1]}
    assert (net.filters, net.chardevs) == ({}, [])


def test_a_release_is_four_orders_for_each_card_and_one_more_for_the_open_epoch(
    net: Net, held: Buffers
) -> None:
    held.close_epoch()
    before = len(net.events)
    held.release()
    assert len(net.events) - before == 5 * len(CARDS)
