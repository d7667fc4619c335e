"""Limits of waiting scale with the machine's speed."""

import time

import pytest

from vmckpt_lab import machine_speed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its first number is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_machine_of_half_the_speed_gets_twice_the_time(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "slowness", lambda: 2.0)
    deadline = machine_speed.Deadline(10.0)
    for now, passed in ((109.9, False), (110.1, False), (119.9, False), (120.1, True)):
        clock[0] = now
        assert deadline.passed() is passed


def test_once_stretched_a_limit_is_not_shortened(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = machine_speed.Deadline(10.0)
    monkeypatch.setattr(machine_speed, "slowness", lambda: 3.0)
    clock[0] = 111.0
    assert not deadline.passed()
    monkeypatch.setattr(machine_speed, "slowness", lambda: 1.0)
    clock[0] = 129.0
    assert not deadline.passed()
    clock[0] = 130.0
    assert deadline.passed()


def test_a_wait_that_ends_in_time_measures_nothing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "slowness", lambda: pytest.fail("measured"))
    deadline = machine_speed.Deadline(10.0)
    clock[0] = 109.0
    assert not deadline.passed()


def test_no_machine_is_faster_than_the_limits_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_sample", lambda: machine_speed.REFERENCE / 4)
    assert machine_speed.slowness() == 1.0
