"""When a controller counts as gone, and until when it may act."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.lease import controller_lease
from vmckpt.lease.controller_lease import guest_of, guest_resource
from vmckpt.units import Seconds

NOW = 1_700_000_000.0
times = st.floats(min_value=0, max_value=4e9)


@pytest.mark.parametrize(
    ("alive", "alive_until", "gone", "attended"),
    [
        (True, None, False, True),
        (True, NOW - 1000, False, True),  # what is seen counts more than what is heard
        (False, NOW + 1000, True, False),
        (False, None, True, False),
        (None, NOW + 0.1, False, True),
        (None, NOW, False, True),
        (None, NOW - 0.1, True, False),
        (None, None, False, None),  # nothing is known: it is left alone
    ],
)
def test_a_controller_is_gone_when_it_is_seen_dead_or_not_heard_of_in_time(
    alive: bool | None, alive_until: float | None, gone: bool, attended: bool | None
) -> None:
    assert controller_lease.abandoned(alive, alive_until, NOW) is gone
    assert controller_lease.attended(alive, alive_until, NOW) is attended


@given(
    beaten=st.floats(min_value=0, max_value=1e7),
    delay=st.floats(min_value=0, max_value=1e3),
    later=st.floats(min_value=0, max_value=1e3),
    ahead=st.floats(min_value=-1e9, max_value=1e9),
)
def test_who_may_still_act_is_abandoned_for_nobody(
    beaten: float, delay: float, later: float, ahead: float
) -> None:
    """The heartbeat arrives `delay` after it was sent, at a server whose clock is `ahead`."""
    alive_until = beaten + delay + ahead + controller_lease.TTL
    acts = controller_lease.holds(Seconds(beaten), Seconds(beaten + later))

    if acts:
        assert not controller_lease.abandoned(None, alive_until, beaten + later + ahead)


@pytest.mark.parametrize(
    ("later", "acts"), [(0.0, True), (28.0, True), (28.1, False), (30.0, False)]
)
def test_a_controller_stops_acting_before_others_may_take_over(later: float, acts: bool) -> None:
    assert controller_lease.holds(Seconds(7.0), Seconds(7.0 + later)) is acts


@given(alive=st.sampled_from([True, False, None]), alive_until=st.none() | times, now=times)
def test_once_gone_a_controller_stays_gone(
    alive: bool | None, alive_until: float | None, now: float
) -> None:
    if controller_lease.abandoned(alive, alive_until, now):
        assert controller_lease.abandoned(alive, alive_until, now + 1)


def test_a_guests_lease_is_named_after_it() -> None:
    assert guest_of(guest_resource("u-1")) == "u-1"
    assert guest_of("host/alpha") is None
