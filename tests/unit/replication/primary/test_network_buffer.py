"""The guest's output, with a QEMU whose filters work as QEMU's own do."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import filternet
from tests.support.filternet import CARDS, OWNER, Net, buffers_of
from tests.support.staging import in_memory
from vmckpt.errors import HypervisorError
from vmckpt.replication.primary import network_buffer
from vmckpt.replication.primary.network_buffer import MOST, Buffers


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


def test_what_is_sent_waits_for_its_own_epoch(net: Net, held: Buffers) -> None:
    net.send("net0", 1, 2)
    assert held.close_epoch() == 2
    net.send("net0", 3)
    assert net.wire["net0"] == []
    held.release()
    assert net.wire["net0"] == [1, 2]
    assert held.close_epoch() == 1
    net.send("net0", 4)
    held.release()
    assert net.wire["net0"] == [1, 2, 3]


def test_an_epoch_that_was_not_released_goes_out_with_the_next_in_its_order(
    net: Net, held: Buffers
) -> None:
    net.send("net0", 1)
    held.close_epoch()
    net.send("net0", 2)
    held.close_epoch()
    net.send("net0", 3)
    held.release()
    assert net.wire["net0"] == [1, 2]


def test_each_card_has_its_own_and_the_fullest_one_counts(net: Net, held: Buffers) -> None:
    net.send("net0", 1)
    net.send("net1", 7, 8, 9)
    assert held.collected() == 3
    assert held.close_epoch() == 3
    assert held.collected() == 0
    held.release()
    assert net.wire == {"net0": [1], "net1": [7, 8, 9]}


def test_what_an_epoch_has_is_counted_until_it_is_closed(net: Net, held: Buffers) -> None:
    counts = []
    for packet in range(4):
        net.send("net1", packet)
        counts.append(held.collected())
    held.close_epoch()
    net.send("net1", 5)
    held.release()  # the last epoch's
    assert [*counts, held.collected()] == [1, 2, 3, 4, 1]


def test_packets_beyond_what_qemu_keeps_are_counted_all_the_same(net: Net, held: Buffers) -> None:
    net.send("net0", *range(MOST + 5))
    assert held.close_epoch() == MOST + 5
    held.release()
    assert len(net.wire["net0"]) == MOST
    assert held.lost == 5
    assert network_buffer.EARLY <= MOST // 2


def test_packets_that_epochs_which_were_not_released_leave_no_room_for_are_counted(
    net: Net, held: Buffers
) -> None:
    """One after the other did not come to the backup: what is held is full, too."""
    for _ in range(3):
        net.send("net0", *range(4000))
        held.close_epoch()
    assert held.lost == 2000
    held.release()
    assert len(net.wire["net0"]) == MOST
    net.send("net0", *range(MOST))
    held.close_epoch()
    assert held.lost == 2000


def test_packets_that_are_lost_when_the_filters_go_are_counted_and_those_of_each_card(
    net: Net, held: Buffers
) -> None:
    for card in CARDS:
        net.send(card, *range(MOST + 1))
    held.remove()
    assert held.lost == 2
    assert [len(wire) for wire in net.wire.values()] == [MOST, MOST]


def test_a_long_counter_gives_its_room_back_and_counts_on(
    net: Net, held: Buffers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_buffer, "_LARGE", 8192)
    file = folder / "count-net0"
    for _ in range(3):
        net.send("net0", *range(1000))
        assert held.collected() == 1000
        assert held.close_epoch() == 1000
        assert file.stat().st_blocks * 512 <= 4096
        assert held.collected() == 0
        held.release()
    net.send("net0", 1)
    assert held.collected() == 1
    assert file.stat().st_size > 3000 * 17
    assert file.stat().st_blocks * 512 <= 8192


def test_a_short_counter_is_left_as_it_is(net: Net, held: Buffers, folder: Path) -> None:
    net.send("net0", *range(10))
    held.close_epoch()
    assert (folder / "count-net0").stat().st_size == 24 + 170


def test_all_is_let_out_in_its_order_when_the_filters_go(
    net: Net, held: Buffers, folder: Path
) -> None:
    net.send("net0", 1)
    held.close_epoch()
    net.send("net0", 2)
    held.remove()
    net.send("net0", 3)
    assert net.wire["net0"] == [1, 2, 3]
    assert net.filters == {}
    assert list(folder.iterdir()) == []
    held.remove()


def test_filters_that_went_can_be_added_again(net: Net, held: Buffers) -> None:
    net.send("net0", *range(5))
    held.close_epoch()
    held.remove()
    held.add()
    net.send("net0", 6)
    assert held.collected() == 1
    assert held.close_epoch() == 1
    assert held.lost == 0


@pytest.mark.parametrize("count", range(8))
def test_half_of_them_can_be_taken_away(net: Net, held: Buffers, folder: Path, count: int) -> None:
    del held
    names = list(net.filters)
    for name in names[count:]:
        net.tell("object-del", {"id": name})
    assert not network_buffer.there(net, CARDS)
    network_buffer.remove(net, folder)
    assert (net.filters, net.chardevs) == ({}, [])


def test_one_that_cannot_be_taken_away_is_told_and_the_others_go(
    net: Net, held: Buffers, folder: Path
) -> None:
    del held
    net.fails = {"object-del": HypervisorError("the monitor hangs", host="alpha")}
    with pytest.raises(HypervisorError, match="hangs"):
        network_buffer.remove(net, folder)
    assert list(net.filters) == ["vmckpt-sink-net0"]


def test_whether_all_are_there_is_seen(net: Net, held: Buffers) -> None:
    del held
    assert network_buffer.there(net, CARDS)
    assert not network_buffer.there(net, (*CARDS, "net2"))
    assert network_buffer.there(net, ())


def test_a_new_agent_goes_on_with_the_filters_of_the_one_before(
    net: Net, held: Buffers, folder: Path
) -> None:
    net.send("net0", 1, 2)
    held.close_epoch()
    net.send("net0", 3)
    new = buffers_of(net, folder)
    new.attach()
    assert new.collected() == 0  # nobody knows how many there were
    net.send("net0", 4)
    assert new.collected() == 1
    new.close_epoch()
    assert net.wire["net0"] == []
    new.release()
    assert net.wire["net0"] == [1, 2, 3, 4]


@pytest.mark.parametrize("step", range(2, 6))
def test_nothing_gets_out_early_whose_release_was_broken_off(
    net: Net, held: Buffers, folder: Path, step: int
) -> None:
    one_card = buffers_of(net, folder, "net0")
    one_card.attach()
    net.send("net0", 1)
    one_card.close_epoch()
    net.send("net0", 2)
    orders = iter(range(step))
    tell = net.tell

    def killed(*words: Any, **more: Any) -> Any:
        if next(orders, None) is None:
            raise HypervisorError("killed", host="alpha")
        return tell(*words, **more)

    with pytest.MonkeyPatch.context() as patch, suppress(HypervisorError):
        patch.setattr(net, "tell", killed)
        one_card.release()
    new = buffers_of(net, folder, "net0")
    new.attach()
    net.send("net0", 3)
    new.close_epoch()
    net.send("net0", 4)
    assert net.wire["net0"] == [1]
    new.release()
    assert net.wire["net0"] == [1, 2, 3]


def test_an_epochs_end_is_one_order_for_each_card(net: Net, held: Buffers) -> None:
    held.close_epoch()
    held.release()
    before = len(net.events)
    held.close_epoch()
    assert len(net.events) - before == len(CARDS)


def test_a_new_agent_counts_on_where_a_counter_was_emptied(
    net: Net, held: Buffers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_buffer, "_LARGE", 8192)
    net.send("net0", *range(1000))
    held.close_epoch()
    new = buffers_of(net, folder)
    new.attach()
    net.send("net0", 1)
    assert new.collected() == 1


def test_the_counter_is_qemu_s_to_write_and_nobody_else_s(held: Buffers, folder: Path) -> None:
    del held
    told = (folder / "count-net0").stat()
    assert (told.st_mode & 0o777, told.st_uid) == (0o600, OWNER[0])


def test_a_guest_without_cards_has_nothing_to_hold(net: Net, folder: Path) -> None:
    none = Buffers(net, (), folder, OWNER)
    none.add()
    none.keep()
    assert (none.collected(), none.close_epoch()) == (0, 0)
    none.release()
    none.remove()
    assert net.events == []
