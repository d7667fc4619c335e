"""Leave to go on without a standby: asked for by one wait, and good for that one alone."""

from collections.abc import Iterator

import pytest

from tests.support.primaries import World, world
from tests.support.replicas import LEASE, session, until
from vmckpt.replication.primary import loop
from vmckpt.replication.primary.solo_permission import SoloPermission
from vmckpt.replication.session import ProtectionTerms
from vmckpt.replication.status import Phase
from vmckpt.units import Seconds

TERMS = ProtectionTerms(interval=Seconds(0.02), automatic=True, hold=Seconds(0.1))


def test_where_it_is_not_needed_it_is_always_there() -> None:
    leave = SoloPermission(needed=False)
    assert leave.has()
    assert leave.wanted is None
    assert not leave.grant("")


def test_it_is_given_under_the_name_it_was_asked_for() -> None:
    leave = SoloPermission(needed=True)
    assert not leave.grant("anything")
    assert not leave.has()
    name = leave.wanted
    assert name is not None
    assert not leave.has()
    assert leave.wanted == name
    assert not leave.grant(name + "x")
    assert not leave.has()
    assert leave.grant(name)
    assert leave.has()
    assert leave.wanted == name  # until it is used: nobody takes the standby for whole meanwhile


def test_leave_for_an_earlier_wait_is_none_for_this_one() -> None:
    leave = SoloPermission(needed=True)
    leave.has()
    late = leave.wanted
    assert late is not None
    leave.over()
    assert leave.wanted is None
    assert not leave.grant(late)
    assert not leave.has()
    assert not leave.grant(late)
    assert not leave.has()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"terms": TERMS}, True),
        ({"terms": TERMS, "lease": LEASE}, False),
        ({"terms": TERMS, "moves": True}, False),
        ({}, False),
    ],
)
def test_it_is_needed_where_a_controller_fails_over_unasked(
    changes: dict[str, object], needed: bool
) -> None:
    assert session(**changes).needs_leave == needed


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))
    with world(terms=TERMS) as made:
        yield made


def wanted(one: World) -> str:
    until(lambda: one.leave.wanted is not None)
    name = one.leave.wanted
    assert name is not None
    return name


def test_output_waits_for_it_as_long_as_it_takes(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.peer.away = True
        name = wanted(one)
        one.requests.wait(Seconds(0.5))
        assert "let all out" not in one.since("hold")
        assert one.phase() != Phase.ALONE
        assert "waits for permission to run unprotected" in one.says()
        one.leave.grant(name)
        until(lambda: one.phase() == Phase.ALONE)
        assert "let all out" in one.since("hold")
        assert one.leave.wanted is None
        # The next time it is asked for anew.
        one.peer.away = False
        one.epochs(1)
        one.peer.away = True
        assert wanted(one) != name
        one.requests.wait(Seconds(0.3))
        held = len(one.events) - one.events[::-1].index("hold")
        assert "let all out" not in one.events[held:]


def test_a_backup_that_comes_back_in_time_ends_the_wait(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.peer.away = True
        name = wanted(one)
        one.peer.away = False
        one.epochs(2)
        assert one.leave.wanted is None
        assert not one.leave.grant(name)
        assert "let all out" not in one.since("hold")
        assert one.follows()


def test_a_device_that_was_plugged_in_is_no_leave(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_DEVICES", Seconds(0.01))
    with one.run():
        one.epochs(1)
        one.devices.are_same = False
        name = wanted(one)
        one.requests.wait(Seconds(0.2))
        assert "let all out" not in one.since("hold")
        one.leave.grant(name)
        until(lambda: one.phase() == Phase.ALONE)


def test_a_lease_store_that_was_away_is_asked_again_once_a_device_was_plugged_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))
    monkeypatch.setattr(loop, "_DEVICES", Seconds(0.01))
    with world(lease=LEASE) as one, one.run():
        one.epochs(1)
        one.lease_holder.unreachable = True
        one.devices.are_same = False
        until(lambda: "cannot be recorded" in one.says())
        one.lease_holder.unreachable = False
        until(lambda: one.phase() == Phase.ALONE)
