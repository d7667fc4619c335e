"""Held output: what can be held, that it is let out whatever happens, and by whom."""

import json

import pytest

from tests.support.held_output import UNDO, Qemu, card
from vmckpt.capture import network_hold
from vmckpt.capture.network_hold import HoldUndo, OutputHold
from vmckpt.errors import CannotCapture, CaptureFailed, HypervisorError
from vmckpt.units import Seconds


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_card_that_cannot_be_held_is_named_and_nothing_is_changed() -> None:
    qemu = Qemu(card(), card(kind="hostdev", name="net1"))
    with pytest.raises(CannotCapture, match=r"buffered: net1 \(hostdev\) bypasses QEMU") as refused:
        network_hold.hold_facts(qemu)
    assert "net0" not in str(refused.value)
    assert refused.value.hint == "use virtio cards on a bridge instead"
    assert qemu.told == []


def test_a_card_with_queues_can_be_replaced() -> None:
    qemu = Qemu(card(driver="<driver queues='2'/>"))
    with pytest.raises(CannotCapture, match="net0 has 2 queues") as refused:
        network_hold.hold_facts(qemu)
    assert refused.value.hint == "run vmckpt prepare web1 --live"


def test_facts_survive_and_others_are_refused() -> None:
    qemu = Qemu(card(), card(name="net1"))
    assert network_hold.hold_facts(qemu) == UNDO == HoldUndo.from_json(UNDO.to_json())
    for wrong in ('{"guest": 1}', "[]", '{"guest":"a","cards":[1],"runs":true}'):
        with pytest.raises((ValueError, TypeError)):
            HoldUndo.from_json(wrong)


def test_it_is_held_and_let_go() -> None:
    qemu, clock = Qemu(), Clock()
    with OutputHold(qemu, UNDO, limit=Seconds(15.0), clock=clock) as hold:
        hold.begin()
        made = qemu.filters["vmckpt-hold-net1"]
        assert (made["netdev"], made["queue"], made["interval"]) == ("hostnet1", "rx", 15_000_000)
        clock.now += 0.25
        assert hold.let_go() == 0.25
        assert qemu.filters == {}
    assert qemu.told == ["object-add", "object-add", "object-del", "object-del"]


def test_what_is_lost_before_the_end_spoils_the_cut() -> None:
    qemu, clock = Qemu(), Clock()
    with OutputHold(qemu, UNDO, limit=Seconds(15.0), clock=clock) as hold:
        hold.begin()
        clock.now += 14.6  # QEMU's own timer may have let something out
        with pytest.raises(CaptureFailed, match="released before all guests were captured"):
            hold.let_go()
        assert qemu.filters == {}
    with OutputHold(qemu, UNDO, clock=clock) as hold:
        hold.begin()
        del qemu.filters["vmckpt-hold-net0"]
        with pytest.raises(CaptureFailed, match="released before all guests were captured"):
            hold.let_go()
        assert qemu.filters == {}


def test_whatever_goes_wrong_nothing_stays_held() -> None:
    qemu = Qemu(refuses="hostnet1")
    with (
        pytest.raises(CannotCapture, match="vhost is not supported"),
        OutputHold(qemu, UNDO) as hold,
    ):
        hold.begin()
    assert qemu.filters == {}
    other = Qemu()
    with OutputHold(other, UNDO) as hold:
        hold.begin()
    assert other.filters == {}
    with OutputHold(other, UNDO) as hold:
        hold.begin()
        hold.drop()
        hold.drop()
    assert other.filters == {}


@pytest.mark.parametrize(
    ("state", "migration", "by_somebody", "runs", "after"),
    [
        ("paused", "none", False, True, "running"),
        ("paused", "completed", False, True, "running"),
        ("paused", "active", False, True, "paused"),
        ("paused", "none", True, True, "paused"),
        ("paused", "none", False, False, "paused"),
        ("postmigrate", "completed", False, True, "postmigrate"),
    ],
)
def test_a_guest_whose_agent_hangs_goes_on(
    state: str, migration: str, by_somebody: bool, runs: bool, after: str
) -> None:
    qemu = Qemu(state=state)
    qemu.migration, qemu.by_somebody = migration, by_somebody
    qemu.filters = {"vmckpt-hold-net0": {}, "vmckpt-hold-net1": {}}
    undo = HoldUndo(guest=UNDO.guest, cards=UNDO.cards, runs=runs)
    network_hold.put_back(qemu, undo)
    assert (qemu.filters, qemu.state) == ({}, state)
    network_hold.put_back(qemu, undo, resume=True)
    assert qemu.state == after


def test_all_filters_are_tried() -> None:
    qemu = Qemu()
    qemu.dead = True
    with pytest.raises(HypervisorError, match="no answer"):
        network_hold.remove(qemu, UNDO.cards)
    assert qemu.told == ["object-del", "object-del"]
    assert json.loads(UNDO.to_json())["cards"] == ["net0", "net1"]
