"""Devices that are plugged in or out while a guest is protected, and output that waits for long."""

import time
from collections.abc import Iterator

import pytest

from tests.support.primaries import World, world
from tests.support.replicas import until
from vmckpt.replication.control_socket import Request
from vmckpt.replication.primary import loop
from vmckpt.replication.session import ProtectionTerms
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import slowness

OFTEN = ProtectionTerms(interval=Seconds(0.02), automatic=False)
RARELY = ProtectionTerms(interval=Seconds(9.0), automatic=False)
NEEDS_LEAVE = ProtectionTerms(interval=Seconds(0.02), automatic=True, hold=Seconds(0.1))
LAST_WORDS = ("invalidated", "alone", "let all out", "mirrored no more")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))


@pytest.fixture
def one() -> Iterator[World]:
    with world(terms=OFTEN) as made:
        yield made


def goes_alone(one: World) -> None:
    until(lambda: "plugged or unplugged" in one.says())
    after = [event for event in one.since("hold") if event in LAST_WORDS]
    assert after == list(LAST_WORDS)


def test_no_epoch_that_was_captured_with_another_device_is_sealed(one: World) -> None:
    """The standby could not load its state."""
    captured: list[int] = []

    def plug(number: int) -> None:
        if number == 4:
            one.devices.are_same = False
            captured.append(number)

    one.capturer.before = plug
    with one.run():
        goes_alone(one)
    assert captured == [4]
    assert [seal.epoch for seal in one.peer.seals] == [1, 2, 3]


def test_each_epoch_looks_at_the_devices_before_it_is_sealed(one: World) -> None:
    with one.run():
        one.epochs(5)
    assert one.devices.quick_looks >= 5


def test_a_device_that_libvirt_reports_is_looked_at_at_once() -> None:
    with world(terms=RARELY) as one, one.run():
        one.epochs(1)
        one.devices.are_same = False
        one.devices.told = True
        began = time.monotonic()
        goes_alone(one)
        assert time.monotonic() - began < 0.5 * slowness()


def test_a_device_that_is_plugged_in_while_the_line_is_down_is_seen_as_well(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.peer.away = True
        until(lambda: one.lease_holder.line is None)
        assert "let all out" not in one.since("hold")
        one.devices.are_same = False
        one.devices.told = True
        goes_alone(one)


@pytest.mark.parametrize("leaves", [5, 10**9])
def test_a_standby_can_take_over_until_a_card_that_is_gone_has_no_filters(
    one: World, monkeypatch: pytest.MonkeyPatch, leaves: int
) -> None:
    """QEMU may crash when it frees the card, and the guest would be lost."""
    monkeypatch.setattr(loop, "_UNPLUGS", Seconds(0.2))
    with one.run():
        one.epochs(1)
        one.held.leaves = leaves
        one.devices.gone = {"net0"}
        one.devices.are_same, one.devices.told = False, True
        until(lambda: len(one.held.asked_for) > 2)
        assert "invalidated" not in one.since("hold")
        goes_alone(one)
    assert one.held.discarded == {"net0"}
    assert len(one.held.asked_for) >= 5


def test_a_switch_whose_last_epoch_has_another_device_does_not_take_place(one: World) -> None:
    def plug(_: int) -> None:
        one.devices.are_same = not one.requests.has(Request.PLANNED)

    one.capturer.before = plug
    with one.run():
        one.epochs(1)
        one.requests.add(Request.PLANNED)
        goes_alone(one)
        assert "go on" in one.since("switching")
        assert not one.requests.has(Request.PLANNED)
    assert "given away" not in one.events
    assert not any(seal.final for seal in one.peer.seals)


@pytest.mark.parametrize("where", ["between epochs", "for an acknowledgement", "for leave"])
def test_output_is_kept_wherever_the_agent_waits(where: str) -> None:
    terms = {"between epochs": RARELY, "for an acknowledgement": OFTEN, "for leave": NEEDS_LEAVE}
    with world(terms=terms[where]) as one, one.run():
        one.epochs(1)
        if where == "for an acknowledgement":
            one.peer.mute = True
            until(lambda: len(one.peer.seals) > one.events.count("released"))
        elif where == "for leave":
            one.peer.away = True
            until(lambda: one.leave.wanted is not None)
        kept = one.held.kept
        until(lambda: one.held.kept > kept + 2)
        one.peer.mute = False
