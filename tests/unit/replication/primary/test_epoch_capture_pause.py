"""What is told of a guest that stands still for a moment of each epoch."""

from collections.abc import Iterator
from unittest.mock import Mock

import libvirt
import pytest

from vmckpt.hypervisor import domains

RUNNING = (libvirt.VIR_DOMAIN_RUNNING, 1)  # booted
EPOCH = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_UNKNOWN)
BY_A_PERSON = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)


def seen(states: Iterator[tuple[int, int]]) -> tuple[int, int]:
    return domains.state_of(Mock(state=lambda: next(states)))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "_EPOCH_PAUSE", 0.0)


def test_a_pause_that_is_over_at_the_next_look_is_none() -> None:
    assert seen(iter([EPOCH, EPOCH, RUNNING])) == RUNNING


def test_one_that_lasts_is_told() -> None:
    assert seen(iter([EPOCH] * 9)) == EPOCH


def test_whoever_is_paused_by_libvirt_is_not_waited_for() -> None:
    assert seen(iter([BY_A_PERSON, RUNNING])) == BY_A_PERSON
