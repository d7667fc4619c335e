"""For how long a lease is good, for its holder and for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import BadInput
from vmckpt.lease import terms
from vmckpt.lease.terms import LeaseTerms
from vmckpt.units import Seconds


@st.composite
def kept(draw: st.DrawFn) -> LeaseTerms:
    ttl = Seconds(draw(st.floats(min_value=1, max_value=3600)))
    least = terms.least_margin(ttl)
    return LeaseTerms(ttl=ttl, margin=Seconds(draw(st.floats(min_value=least, max_value=ttl / 2))))


@given(
    terms_=kept(),
    sent=st.floats(min_value=0, max_value=1e6),
    way=st.floats(min_value=0, max_value=1e3),
    fast=st.floats(min_value=-terms.DRIFT, max_value=terms.DRIFT),
    slow=st.floats(min_value=-terms.DRIFT, max_value=terms.DRIFT),
)
def test_nobody_takes_over_before_the_guest_is_dead(
    terms_: LeaseTerms, sent: float, way: float, fast: float, slow: float
) -> None:
    """The renewal takes `way` to be written; the clocks run `fast` and `slow` beside true time."""
    dead = sent + terms_.lasts / (1 - abs(slow)) + terms.WATCHDOG_TURN + terms.KILLED_IN
    written = sent + way
    passed = (dead - written) * (1 + fast)

    assert passed <= terms_.waits + 1e-6


@given(terms_=kept())
def test_several_renewals_may_fail_before_the_lease_is_lost(terms_: LeaseTerms) -> None:
    assert 4 * terms_.every + terms_.limit * 0.9 <= terms_.lasts
    assert terms_.limit <= terms_.every


def test_the_guest_runs_until_its_lease_ends_and_others_wait_longer() -> None:
    agreed = LeaseTerms(ttl=Seconds(5.0), margin=Seconds(1.0))

    assert (agreed.lasts, agreed.waits) == (4.0, 6.0)


@pytest.mark.parametrize(
    ("ttl", "margin", "told"),
    [
        pytest.param(0.5, 0.2, "invalid lease lifetime 500 ms", id="too short"),
        pytest.param(4000, 1, "between 1.0 s and an hour", id="too long"),
        pytest.param(float("nan"), 1, "invalid lease lifetime", id="no number"),
        pytest.param(5, 0.1, "invalid margin 100 ms", id="no time to kill"),
        pytest.param(5, 3, "lifetime of 5.0 s; choose a margin between 155 ms", id="too wide"),
        pytest.param(3600, 1, "choose a margin between 3.8 s", id="the clocks drift"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(ttl: float, margin: float, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        LeaseTerms(ttl=Seconds(ttl), margin=Seconds(margin))
