"""The hosts and guests of an inventory, and labels."""

import pytest

from tests.support.two_copies import INVENTORY, ONE, TWICE, TWO, asked
from vmckpt.app import fleet
from vmckpt.units import Seconds


async def test_hosts_are_asked_again_before_a_guest_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = asked(monkeypatch, TWO, TWO, TWO, ONE, ONE)
    assert await fleet.copies(INVENTORY, within=Seconds(3.0)) == (TWICE,)
    assert limits == [3.0, 3.0]
    assert await fleet.copies(INVENTORY) == ()  # it had moved
    assert await fleet.copies(INVENTORY) == ()
    assert len(limits) == 5
